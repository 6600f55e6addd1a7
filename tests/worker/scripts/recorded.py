"""Fails in step 2 under torch elastic's @record."""

from torch.distributed.elastic.multiprocessing.errors import record

import regrow


@record
def main() -> None:
    run = regrow.attach()
    for step in run.steps(5):
        if step == 2:
            raise RuntimeError("recorded")
        run.complete(step, loss=1.0)


if __name__ == "__main__":
    main()
