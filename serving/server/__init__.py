"""Serves one model to all apps of a device over HTTP and a Unix socket; `daemon.run` starts it.

A request is a body of its format (`api`). It becomes a `Call` (`calls`), an accepted `Job` (`job`), which the
scheduler orders, and the engine's `Run`. Its answer is the job's `Event`s (`calls`), which add up to a
`Choice` (`api.answers`). The `Backend` is what the front sees of the engine's thread, the `Executor`.
"""
