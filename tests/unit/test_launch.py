"""Launching: what travels to workers is a list, and secrets are not on it."""

from slime_cua.launch.ray_runtime import forwarded_environment


def test_interface_variables_travel_and_shell_junk_and_secrets_stay():
    head = {
        "NCCL_SOCKET_IFNAME": "eth1",
        "GLOO_SOCKET_IFNAME": "eth1",
        "SLIME_CUA_X": "1",
        "SLIME_CUA_API_KEY": "k",
        "LS_COLORS": "long",
        "BASH_FUNC_x%%": "() {  :\n}",
        "WANDB_API_KEY": "k",
        "HOME": "/root",
    }
    assert forwarded_environment(head) == {
        "NCCL_SOCKET_IFNAME": "eth1",
        "GLOO_SOCKET_IFNAME": "eth1",
        "SLIME_CUA_X": "1",
    }
