"""How numbers are chosen (grid, rtn, mse, inverse, kernels), and how a job is carried out (account, plan, convert)."""
