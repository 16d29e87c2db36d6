r"""Answers the chapter's six exercises: each predicted from formulas, simulated, answered, drawn.

  python -m experiments.exercises --config=configs/exercises.py --exercise=2
  python -m experiments.exercises --config=configs/exercises.py --workdir=runs/exercises

A prediction is computed and printed before its run begins. An answer is a paragraph whose numbers
come from the run; it says so where they are not the predicted ones.
"""

from __future__ import annotations

import textwrap
from typing import Any

from absl import flags

from deepinfer_jax.report import page, records, write
from deepinfer_jax.report.table import table
from experiments import harness
from experiments.answers import (
    exercise_1,
    exercise_2,
    exercise_3,
    exercise_4,
    exercise_5,
    exercise_6,
)
from experiments.answers.answer import Answer, Exercise, Prediction

CHOICE = flags.DEFINE_enum("exercise", "all", [*"123456", "all"], "Which exercise to answer.")

EXERCISES: dict[str, Exercise] = {
    str(number): module.EXERCISE
    for number, module in enumerate(
        (exercise_1, exercise_2, exercise_3, exercise_4, exercise_5, exercise_6), start=1
    )
}


def say(head: str, text: str) -> None:
    """A paragraph under its head, as wide as the tables."""
    print("\n" + textwrap.fill(f"{head}. {text}", 100))


def solve(number: str, section: dict[str, Any], seed: int) -> tuple[Prediction, Answer]:
    """Predicts, prints the prediction, runs, prints the answer."""
    exercise = EXERCISES[number]
    say(f"Exercise {number}", exercise.question)
    prediction = exercise.predict(section, seed)
    say("Predicted", prediction.text)
    answer = exercise.answer(section, seed, prediction)
    for one in answer.tables:
        print("\n" + table(one.rows, title=one.title))
    say("Answer", answer.text)
    return prediction, answer


def main(run: harness.Run) -> None:
    chosen = [n for n in EXERCISES if CHOICE.value in (n, "all")]
    solved = {n: solve(n, run.parameters[f"exercise_{n}"], run.seed) for n in chosen}
    if not run.workdir:
        return
    environment = records.environment()
    told = {
        f"exercise_{n}": {
            "question": EXERCISES[n].question,
            "prediction": prediction.text,
            "answer": answer.text,
            **answer.summary,
        }
        for n, (prediction, answer) in solved.items()
    }
    records.write_json(run.workdir / "summary.json", {**environment, **told})
    drawn = [plot for _, answer in solved.values() for plot in answer.plots]
    write.write_plots(run.workdir, drawn)
    sentences = []
    for n, (prediction, answer) in solved.items():
        sentences += [
            f"Exercise {n}. {EXERCISES[n].question}",
            f"Predicted. {prediction.text}",
            f"Answer. {answer.text}",
        ]
    page.write(
        run.workdir / "report.html",
        page.Page(
            run.parameters["title"],
            "The chapter, section 11.7",
            sentences=sentences,
            plots=drawn,
            tables=[t for _, answer in solved.values() for t in answer.tables],
            provenance=run.provenance,
            environment=environment,
        ),
    )
    print(f"\nwrote {run.workdir}/report.html")


if __name__ == "__main__":
    harness.run(main, config="configs/exercises.py")
