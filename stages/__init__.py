"""What is done to data: one module per stage, free of Prefect, Hydra and the pipeline package."""
