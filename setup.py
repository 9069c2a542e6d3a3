"""Distribution `slime-cua`. Extras keep the roles apart: a desktop host installs without torch and Ray.

The pins are what the tests run on; `requirements/cpu.lock` holds the whole closed set of the CPU environment.
- torch 2.13.0 on CPU; on H200 nodes the image's own build (2.11.0+cu130 was seen working).
- megatron-core 0.16.1: the newest for Python 3.11; 0.17 and later need 3.12. mcore-bridge 1.6.5 has Qwen3.5 with
  vision; the patches in megatron_patches/ refuse other versions until they were tried.
- transformers below 5.20 (ms-swift); 5.17.0 is what the logits tests compare with.
- peft below 0.21 is mcore-bridge's limit.
SGLang, ms-swift and OSWorld's evaluators pin conflicting versions: each has an environment of its own.
"""

from setuptools import find_packages, setup

CORE = [
    "pydantic>=2.9,<3",
    "omegaconf>=2.3",
    "pyyaml",
    "typer>=0.12",
    "rich",
    "numpy",
    "httpx>=0.27,<1",
    "pillow",
]
SANDBOX = [
    "fastapi",
    "uvicorn",
    "aiohttp>=3.10",
    "httptools",
    "python-multipart",
    "websockets",
    "python-xlib>=0.33",
    "prometheus-client",
]
DOCKER = ["docker>=7,<8"]
"""For provider=docker, beside `sandbox`."""
TORCH = ["torch>=2.11", "transformers>=5.12.1,<5.20", "safetensors", "tokenizers"]
TRAIN = [
    *TORCH,
    "megatron-core==0.16.1",
    "mcore_bridge==1.6.5",
    "peft>=0.11,<0.21",
    "ray[default]==2.60.0",
    "wandb>=0.19",
    "tqdm",
    "matplotlib",
    "jinja2",
]
ROLLOUT = [*TORCH, "ray[default]==2.60.0", "fastapi", "uvicorn"]
DEV = ["pytest", "pytest-asyncio", "pytest-timeout", "hypothesis", "ruff", "mypy"]

setup(
    name="slime-cua",
    version="0.1.0",
    description="Asynchronous reinforcement learning for computer-use agents: Megatron training, SGLang rollout, live desktops",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(
        include=["slime_cua*", "rollout*", "sandbox_cluster*", "megatron_patches*"],
    ),
    package_data={"": ["*.jinja", "*.json", "*.xml", "*.yaml", "*.npz", "py.typed", "*.lock"]},
    install_requires=CORE,
    extras_require={"sandbox": SANDBOX, "docker": DOCKER, "train": TRAIN, "rollout": ROLLOUT, "dev": DEV},
    entry_points={"console_scripts": ["slime-cua = slime_cua.cli:main"]},
)
