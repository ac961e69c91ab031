"""``tailopt traces``, ``engines`` and ``policies``: what is there."""

from tailopt.cli.errors import plain_errors
from tailopt.cli.output import print_all


def traces() -> None:
    """List the bundled traces with their sources."""
    with plain_errors():
        from tailopt.report.listing import trace_list
        from tailopt.trace.catalogue import bundled_traces

        print_all(trace_list(bundled_traces()))


def engines() -> None:
    """List the bundled engine profiles with their sources."""
    with plain_errors():
        from tailopt.engine.catalogue import bundled_engines, load_engine
        from tailopt.report.listing import engine_list

        print_all(engine_list(load_engine(name) for name in bundled_engines()))


def policies() -> None:
    """List the policies and predictors with their options and sources."""
    with plain_errors():
        from tailopt.policies import POLICIES
        from tailopt.predict import PREDICTORS
        from tailopt.report.listing import function_list, own_functions

        print_all(
            [
                *function_list("Policies", POLICIES),
                "",
                *function_list("Predictors", PREDICTORS),
                "",
                *own_functions(),
            ]
        )
