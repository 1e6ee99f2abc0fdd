"""Teams of replicas, and the sums of a step's gradients and statistics over a team.

docs/files.md says what each file does.
"""
