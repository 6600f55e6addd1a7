"""Values put into the cache of a host engine of NVIDIA's DCGM by its own tool, `dcgmi test --inject`.

They are seen by who asks DCGM (its health checks and policies, dcgm-exporter, what drains nodes by them), not by NVML or the kernel log,
which Regrow's agents read. Samples of the host engine follow and push a value out again, so it is put there once a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal

from regrow.errors import ConfigurationError, OperationalError

PROGRAM = "dcgmi"
_SECONDS = 10.0
_AGAIN_SECONDS = 1.0


def check() -> None:
    """The tool is on this machine.

    Raises:
        ConfigurationError: it is not.
    """
    if shutil.which(PROGRAM) is None:
        raise ConfigurationError(
            f"{PROGRAM} is not on this machine", where="kind dcgm_inject", hint="install datacenter-gpu-manager and start nv-hostengine"
        )


async def inject(gpu: int, field: int, value: int) -> None:
    """Put one value into a field of a GPU, as a sample of this moment.

    Args:
        gpu: DCGM's number of the GPU.
        field: DCGM's number of the field: 230 XID, 319 double-bit errors since start, 150 temperature (dcgm_fields.h).

    Raises:
        OperationalError: the tool failed, did not end, or did not say that it was done; with its words.
    """
    words = ("test", "--inject", "--gpuid", str(gpu), "--field", str(field), "--value", str(value))
    process: asyncio.subprocess.Process | None = None
    try:
        async with asyncio.timeout(_SECONDS):
            process = await asyncio.create_subprocess_exec(
                PROGRAM,
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
            output, _ = await process.communicate()
    except (OSError, TimeoutError) as error:
        if process is not None and process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)  # with what it has started: its end is told when nobody holds its output any more
            await process.wait()
        raise OperationalError(f"{PROGRAM} {' '.join(words)}: {str(error) or 'no end'}", where=f"GPU {gpu}") from error
    said = output.decode(errors="replace").strip()
    if process.returncode or "success" not in said.lower():
        raise OperationalError(
            f"{PROGRAM} ended with {process.returncode}: {said[:300]}",
            where=f"GPU {gpu}",
            hint="is nv-hostengine running, and the field a number?",
        )


async def keep(gpu: int, field: int, value: int) -> None:
    """Put it there once a second until cancelled; the first time was done by `inject`. A time that fails is passed over."""
    while True:
        await asyncio.sleep(_AGAIN_SECONDS)
        with contextlib.suppress(OperationalError):
            await inject(gpu, field, value)
