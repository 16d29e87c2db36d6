r"""Simulates a service under a stream of requests and writes a report.

  python -m experiments.simulate --config=configs/quickstart.py --workdir=runs/quickstart
  python -m experiments.simulate --config=configs/w2_azure.py:smoke
  python -m experiments.simulate --config=configs/w2_azure.py --trace=my_requests.jsonl \
      --config.engines.mixed=12 --config.policy.prefill=least_loaded

A config describes requests (`workload`) and a service (`engines`, `cost`, `cache`, `policy`, ...;
deepinfer_jax/simulator/service.py says what each setting means). Its `cases` are named changes to
it; they run one after the other and share one report. The first run of a shape compiles for 10 to
60 seconds, the simulation itself then takes a second or less per 10,000 requests. With
--perfetto=1000 the first thousand requests can be followed through the engines in ui.perfetto.dev.
"""

from absl import flags

from experiments import harness
from experiments.simulation import (
    capacity_rows,
    load_cases,
    run_cases,
    show,
    write_report,
    write_traces,
)

TRACE = flags.DEFINE_string("trace", "", "A trace file to use instead of the config's workload.")
REQUESTS = flags.DEFINE_integer("requests", 0, "Take this many requests; 0: as the config says.", 0)
PERFETTO = flags.DEFINE_integer(
    "perfetto",
    0,
    "Write trace.json.gz with the times of this many requests, for ui.perfetto.dev; 0: none.",
    0,
)


def main(run: harness.Run) -> None:
    cases = load_cases(run.config, trace=TRACE.value, requests=REQUESTS.value, seed=run.seed)
    results = run_cases(cases)
    capacity = capacity_rows(run.parameters.get("capacity"), results)
    show(results, capacity)
    if run.workdir:
        print(f"\nwrote {write_report(run, results, capacity)}")
        for path in write_traces(run.workdir, results, PERFETTO.value):
            print(f"wrote {path}")


if __name__ == "__main__":
    harness.run(main, config="configs/quickstart.py")
