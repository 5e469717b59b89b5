"""What `drover doctor` is made of: checks, each one function that gives findings, and runs them with a limit."""
