"""`python -m pipeline` is `dapo`."""

from pipeline.cli import main

if __name__ == "__main__":
    main()
