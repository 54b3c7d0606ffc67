"""`pagewalk serve` on a GPU, whose page tables name frames far outside of all memory as soon as the file BREAK exists:
the kernels of the next step read an illegal address, as they would by any wrong address of ours."""

import os
from pathlib import Path

from model.cuda_executor import CudaExecutor, CudaTicket
from model.step_plan import StepPlan
from service.__main__ import main

submit = CudaExecutor.submit


def submit_or_break(executor: CudaExecutor, plan: StepPlan) -> CudaTicket:
    ticket = submit(executor, plan)
    if Path(os.environ["BREAK"]).exists():
        executor._program.state.page_tables.fill_((1 << 30) - 1)  # behind this step, ahead of the next one
    return ticket


if __name__ == "__main__":
    CudaExecutor.submit = submit_or_break  # type: ignore[method-assign]
    main()
