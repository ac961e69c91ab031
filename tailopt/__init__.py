"""tailopt: scheduling policies for LLM reinforcement-learning rollouts, compared with a certified optimum.

The modules depend on each other in one direction, the direction in which the data flows::

    trace, engine -> predict -> plan -> policies -> simulate -> oracle -> compare -> report -> cli

Nothing is imported here, so that ``import tailopt`` is quick; import the part that you need, for example
``from tailopt.trace import Trace``.
"""

__version__ = "0.1.0"
