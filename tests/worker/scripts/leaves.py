"""Leaves the loop after three steps of ten and exits with 0."""

import regrow

run = regrow.attach()
for step in run.steps(10):
    run.complete(step, loss=1.0)
    if step == 3:
        break
