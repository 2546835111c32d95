"""How threads share the items of one call, a job: each has its own part, and who is done takes from others.

Thread t of T begins with items U t / T .. U (t + 1) / T of U, always the same ones, so that a matrix's rows are read by
the same thread in every token. It takes half of what is left of them, then half of the rest, and so on: long ranges to
read, and little to wait for at the end. Then it takes from the others in the same way, neighbours first (t ^ 1, t ^ 2,
...). No word is written by all threads:

    JOB          the job's number, then its units in the low 20 bits; all read it, the caller writes it
    TICKET [t]   the number of the last job that took from t's part, then how many units are taken of it
    DONE [t]     the last job that thread t worked in, then how many units it has finished; only t writes it
    SLEEPS [t]   whether thread t sleeps on its condition variable

The job is complete when the numbers in DONE add up to its units: nobody waits for a thread that has taken nothing. Why
a thread that comes late, between any two instructions, takes nothing and changes nothing:

    1. A ticket only grows within a job, and a job ends only after every unit of every part was taken.
    2. A thread computes a part from one read of JOB, so it knows whether it is empty; it leaves empty ones alone.
    3. It reads the ticket, then whether JOB is still its job. If it is, the ticket is of this job or an earlier one,
       where nothing is taken yet. If its job ends after that, the ticket has changed (1), and the compare-and-swap
       fails: numbers return after 2^44 jobs.
    4. What to call is read after a unit was taken. The job cannot end before that unit is finished, and the caller
       writes the next one only then.

An idle thread spins, yields its core for a while, and sleeps. The caller wakes threads 1 and 2, thread t wakes 2 t + 1
and 2 t + 2, none of them more than there are units: so no thread makes more than two calls of the system. A thread
says that it sleeps before it looks at JOB for the last time, and another looks whether it sleeps after JOB was
written, so one of the two sees the other.
"""

import numpy as np

from bridge.system.kernels.jit import inner
from bridge.system.kernels.memory import array_at
from bridge.system.threads.waiting import give_way, initialize, lock, unlock, wait, wake
from bridge.system.threads.words import ARGUMENTS, call, pause, read, release, swap, write

# words of the state; those that different threads write are two cache lines apart, since they are fetched in pairs
_JOB, _STOP = 0, 1
_PARAMETERS = 16  # function, items, items of a unit, arguments
_THREADS = 32  # of each thread:
_EACH = 64
_TICKET, _DONE, _SLEEPS, _MUTEX, _CONDITION = 0, 1, 16, 32, 48  # the last two are 128 bytes, more than any system's

_BITS = 20
_UNITS = (1 << _BITS) - 1  # at most, and the mask for a word's low bits
_PAUSES = 1500  # of some 30 ns, before an idle thread begins to yield its core
_YIELDS = 200  # before it sleeps


def words(threads: int) -> int:
    """The length of the state of so many threads, int64, on a multiple of 128 bytes, zeros at first."""
    return _THREADS + _EACH * threads


def owner(item: int, items: int, threads: int) -> int:
    """The thread whose part of a number of items has that one."""
    return ((item + 1) * threads - 1) // items


@inner
def _word(thread, number):
    return _THREADS + _EACH * thread + number


@inner
def _take(state, thread, threads, owner, job, finished):
    """Run units of the part of `owner` until none is left; returns the units that `thread` has finished by then."""
    units = job & _UNITS
    part = units * (owner + 1) // threads - units * owner // threads
    if part == 0:
        return finished
    ticket = _word(owner, _TICKET)
    while True:
        before = read(state, ticket)
        if read(state, _JOB) != job:
            return finished
        taken = before & _UNITS if before >> _BITS == job >> _BITS else 0
        if taken == part:
            return finished
        count = (part - taken + 1) // 2
        if not swap(state, ticket, before, job - units + taken + count):
            continue
        p = array_at(state + 8 * _PARAMETERS, 3 + ARGUMENTS, np.int64)
        first = (units * owner // threads + taken) * p[2]
        last = min(first + count * p[2], p[1])
        call(p[0], p[3], p[4], p[5], p[6], p[7], p[8], p[9], first, last)
        finished += count
        release(state, _word(thread, _DONE), job - units + finished)


@inner
def _work(state, thread, threads, job):
    """Run units until none is left: this thread's, then the others'."""
    finished = 0
    distance = 0
    while distance < 2 * threads and read(state, _JOB) == job:
        owner = thread ^ distance
        if owner < threads:
            finished = _take(state, thread, threads, owner, job, finished)
        distance += 1


@inner
def _rouse(state, thread):
    """Wake a thread that sleeps, or is about to."""
    mutex = state + 8 * _word(thread, _MUTEX)
    lock(mutex)
    unlock(mutex)  # now it waits, or will look at JOB and STOP again
    wake(state + 8 * _word(thread, _CONDITION))


@inner
def _wake_next(state, thread, threads, job):
    """Wake the two threads that this one is to wake."""
    for other in range(2 * thread + 1, min(2 * thread + 3, threads, job & _UNITS)):
        sleeps = _word(other, _SLEEPS)
        if read(state, sleeps) and swap(state, sleeps, 1, 0):
            _rouse(state, other)


@inner
def _sleep(state, thread, job):
    """Wait for another job than that."""
    mutex = state + 8 * _word(thread, _MUTEX)
    sleeps = _word(thread, _SLEEPS)
    lock(mutex)
    write(state, sleeps, 1)
    while read(state, _JOB) == job and read(state, _STOP) == 0:
        wait(state + 8 * _word(thread, _CONDITION), mutex)
        write(state, sleeps, 1)
    write(state, sleeps, 0)
    unlock(mutex)


@inner
def begin(state, threads):
    for thread in range(threads):
        initialize(state + 8 * _word(thread, _CONDITION), state + 8 * _word(thread, _MUTEX))


@inner
def serve(state, thread, threads):
    """The life of a thread other than the caller's."""
    seen = 0
    idle = 0
    while read(state, _STOP) == 0:
        job = read(state, _JOB)
        if job != seen:
            _wake_next(state, thread, threads, job)
            _work(state, thread, threads, job)
            seen = job
            idle = 0
            continue
        idle += 1
        if idle < _PAUSES:
            pause()
        elif idle < _PAUSES + _YIELDS:
            give_way()
        else:
            _sleep(state, thread, seen)


@inner
def stop(state, threads):
    """Let the threads end."""
    write(state, _STOP, 1)
    for thread in range(1, threads):
        _rouse(state, thread)


@inner
def _finished(state, threads, job):
    """The units of a job that are finished."""
    total = 0
    for thread in range(threads):
        done = read(state, _word(thread, _DONE))
        if done >> _BITS == job >> _BITS:
            total += done & _UNITS
    return total


@inner
def run(state, threads, function, a, b, c, d, e, f, g, groups):
    """Call a kernel for row groups 0..groups-1; state 0, or one group, means: in this thread."""
    if state == 0 or groups < 2:
        call(function, a, b, c, d, e, f, g, 0, groups)
        return
    unit = (groups + _UNITS - 1) // _UNITS
    units = (groups + unit - 1) // unit
    p = array_at(state + 8 * _PARAMETERS, 3 + ARGUMENTS, np.int64)
    p[0], p[1], p[2] = function, groups, unit
    p[3], p[4], p[5], p[6], p[7], p[8], p[9] = a, b, c, d, e, f, g
    job = ((read(state, _JOB) >> _BITS) + 1) << _BITS | units
    write(state, _JOB, job)
    _wake_next(state, 0, threads, job)
    _work(state, 0, threads, job)
    idle = 0
    while _finished(state, threads, job) < units:
        idle += 1
        if idle < _PAUSES:
            pause()
        else:
            give_way()
