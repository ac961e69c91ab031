"""The kernel's memory: requests, engines and cached blocks as records, so that one's fields lie together."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Records = NDArray[np.void]
Record = Any  # one element of a Records array

REQUEST = np.dtype(
    [
        ("prompt_tokens", np.int64),
        ("limit", np.int64),  # output tokens at which it is over
        ("generated", np.int64),  # kept current while it does not decode
        ("computed", np.int64),  # tokens whose KV is in the cache; likewise
        ("offset", np.int64),  # while it decodes: computed - what its engine has gained
        ("heap_place", np.int32),
        ("wait_next", np.int32),  # the waiting requests of its engine, a linked list
        ("run_next", np.int32),  # the running ones in the order of admission, a linked list
        ("run_previous", np.int32),
        ("engine", np.int32),  # where it runs or waits, or NONE
        ("ran_on", np.int32),  # where it ran last
        ("stay", np.int32),  # its entry in the stays while it runs, else NONE; rises as they are admitted
        ("position", np.int32),  # in the order of the plan: its priority
        ("mark", np.int32),  # the next number of tokens that it is watched for
        ("kv_sent", np.bool_),  # the KV of all its tokens but the last has been sent to its engine
        ("preemptions", np.int32),
        ("group", np.int32),
        ("shared_blocks", np.int64),  # leading blocks on its engine that it shares with its group
        ("chain", np.int32),  # run of its group's blocks on its engine, or NONE
        ("own", np.int32),  # run of its own blocks on its engine, first of its runs on all engines
        ("odd_step", np.int64),  # the step before which the two below say what it holds, as no rule does
        ("held_blocks", np.int64),
        ("full_blocks", np.int64),
        ("start_s", np.float64),
        ("first_token_s", np.float64),
        ("finish_s", np.float64),
    ],
    align=True,
)
# of a heap: a request that decodes, and what its engine has gained when it is over or passes a mark
ENTRY = np.dtype([("due", np.int64), ("request", np.int64)], align=True)
RUN = np.dtype(  # findable blocks: a group's on an engine, a request's own there, or a leftover of these
    [
        ("blocks", np.int64),
        ("holders", np.int32),  # of a group's
        ("previous", np.int32),  # in the free queue
        ("next", np.int32),
        ("engine", np.int32),
        ("sibling", np.int32),  # the next run of the same group, request, or leftovers
        ("leftovers", np.int32),  # of a request's own run
        ("index", np.int64),  # of a leftover: which block of the request it holds
        ("older", np.bool_),  # of a leftover: it became findable before the other copy
    ],
    align=True,
)
ENGINE = np.dtype(
    [
        ("kind", np.int64),  # into the line table
        ("max_running", np.int64),  # at this time
        ("finished", np.int64),  # under the plan in force
        ("next_limit", np.int64),  # the engine's limits that more finishes lead to
        ("end_limit", np.int64),
        ("token_budget", np.int64),
        ("block_tokens", np.int64),
        ("prefix_caching", np.bool_),
        ("priority", np.bool_),
        ("prefill_s", np.float64),  # per prompt token
        ("lookahead", np.int64),  # tokens drafted for each request that decodes
        ("blocks", np.int64),
        ("free", np.int64),  # blocks that nobody holds
        ("blank", np.int64),  # those of them that hold nothing to be found; they are taken first
        ("queue_head", np.int64),  # the others: runs, least recently released first
        ("queue_tail", np.int64),
        ("wait_head", np.int64),
        ("wait_tail", np.int64),
        ("waiting", np.int64),
        ("waiting_blocks", np.int64),  # for the tokens of all that wait
        ("next_own", np.int64),  # the engine's own requests yet to arrive
        ("end_own", np.int64),
        ("run_head", np.int64),
        ("run_tail", np.int64),
        ("running", np.int64),
        ("decoding", np.int64),  # the size of the heap
        ("prefilling", np.int64),  # the one running request that does not decode yet, the last one, or NONE
        ("next_kv", np.int64),  # tokens of those that decode, with one new one each
        ("deficit", np.int64),  # blocks that those with an odd step lack of what the rule says
        ("steady", np.bool_),  # nobody is in prefill, and nobody can be admitted until blocks are released
        ("hungry", np.bool_),  # may pull from the shared queue
        ("in_step", np.bool_),  # or in a jump
        ("done", np.bool_),  # has nothing to do, and nothing to wait for
        ("rests", np.bool_),  # its last entry in the log says that nothing runs
        ("event", np.int64),  # where its next entry in the log will stand
        ("log_width", np.int64),  # see LOG
        ("jump", np.int64),  # steps of the jump it is in, 0 for a single step
        ("rate", np.int64),  # what its requests gain in each of them, in units of 1 / TOKEN
        ("step", np.int64),  # steps taken
        ("tokens", np.int64),  # the token clock, in units of 1 / TOKEN
        ("gained", np.int64),  # the same in whole tokens
        ("last_gain", np.int64),  # in the last step
        ("time_s", np.float64),  # when it acts next: ends its step, or begins one
        ("ready_s", np.float64),  # end of its last step
    ],
    align=True,
)
# Events and stays may be ten times as many as requests, so these are small. The log stands on pages of
# kernel.PAGE entries, each of one engine, whose number the first entry of the page has as its step.
LOG = np.dtype(
    [
        ("step", np.int64),
        ("time_s", np.float64),
        ("use", np.int64),  # blocks * width + running, where width is more than can run
    ]
)
# ``event``: where the log has the step in which it began, hence where and when
STAY = np.dtype([("request", np.int32), ("event", np.int32), ("end_s", np.float64)])

DONE, LOG_FULL, STAYS_FULL, HEAP_FULL, RUNS_FULL, REVIEW = 0, 1, 2, 3, 4, 5
NONE = -1
NEVER = np.inf

UNITS_PULLED, PAGES, STAYS_LENGTH, RUNS_LENGTH, UNFINISHED, PASSED, IDLE = 0, 1, 2, 3, 4, 5, 6
COUNTERS = 7  # places: of the shared queue, of pages of the log, stays and runs in use; and what was crossed
