"""The replay against the live stack: gateway and host processes, sockets, the real episode loop, fake desktops."""

import os

import pytest

from rollout.replay.policies import POLICIES
from slime_cua.launch.live_replay import live_and_replayed

MODEL = "models/tiny_base"


@pytest.mark.slow
def test_the_replays_throughput_is_that_of_the_live_stack(request):
    if os.getloadavg()[0] > 2 * (os.cpu_count() or 1):
        pytest.skip("the machine is busy: the live stack would be slower than what is compared")
    live, replayed = live_and_replayed(POLICIES["ours_1"], request.config.rootpath / MODEL)
    assert replayed.groups_per_hour == pytest.approx(live.groups_per_hour, rel=0.1)
    assert max(live.lag_tokens) == max(replayed.lag_tokens) == 1
    assert live.lost_tokens == 0
