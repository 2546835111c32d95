"""The model of many cores: its calls are a token's, and its threads take the time of the memory at least."""

from pathlib import Path

import pytest

import bridge
from scripts.benchlib.many_cores import CORE, LINE, NODE, SOCKET
from scripts.speed.model_threads import Call, calls_of, present, simulated, token
from tests.conftest import CHECKPOINT


def test_the_calls_are_those_of_a_token(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    bridge.convert(CHECKPOINT, path)
    model = bridge.Model.load(path)
    calls = calls_of(str(path))
    products = [call for call in calls if call.sizes]
    assert len(products) == 4 * model.config.layers + 1
    assert sum(len(call.sizes) for call in products) == 7 * model.config.layers + 1
    assert all(call.alone > 0 for call in calls if not call.shared)
    ns, transfers, ranges = token(present(), calls, 4, False)
    assert ns > 0
    assert ranges >= sum(call.shared for call in calls)
    assert set(transfers) <= {"read", "write", "release", "swap", "lock"}


@pytest.mark.parametrize(("cores", "distribute"), [(2, False), (16, False), (2 * SOCKET, False), (2 * SOCKET, True)])
def test_a_shared_call_takes_the_time_of_the_memory_and_some_lines(cores: int, distribute: bool) -> None:
    call = Call("_several_c", True, 0.0, ((1024, 1 << 26),), 0)
    least = call.nbytes / min(CORE * cores, NODE * -(-cores // SOCKET))
    ns, machine = simulated(present(), call, cores, distribute)
    assert least < ns < 2 * least + 100 * cores
    assert machine.ranges >= cores
    assert machine.transfers.total() >= 2 * (cores - 1)  # each worker read the job, and the caller what it has done
    if cores > SOCKET:
        assert (ns < simulated(present(), call, cores, not distribute)[0]) == distribute


def test_workers_that_sleep_are_woken_two_by_each() -> None:
    call = Call("_several_c", True, 0.0, ((1024, 1 << 26),), 0)
    ns, machine = simulated(present(), call, 16, False, asleep=True)
    assert machine.wakes == 15
    assert ns > simulated(present(), call, 16, False)[0] + min(LINE)
