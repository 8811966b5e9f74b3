"""A database of several threads: each statement is its own, with its own values and errors."""

import threading

import pytest

from jaxllm.errors import CheckpointError, Unreadable
from jaxllm.serving.contexts.database import Database

SCHEMA = "CREATE TABLE things (name TEXT NOT NULL UNIQUE, value INTEGER NOT NULL);"
THREADS, STATEMENTS = 6, 300


def test_threads_share_no_statement(tmp_path):
    database = Database(tmp_path / "things.sqlite", SCHEMA, kind=7, version=1)
    errors = []

    def write(number):
        try:
            for each in range(STATEMENTS):
                name, value = f"{number} {each}", number * STATEMENTS + each
                database.run("INSERT INTO things VALUES (?, ?)", name, value)
                assert database.run("SELECT value FROM things WHERE name = ?", name) == [(value,)]
                with pytest.raises((CheckpointError, Unreadable), match="UNIQUE"):
                    database.run("INSERT INTO things VALUES (?, ?)", name, -1)
                if each % 50 == 0:
                    database.flush()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    values = [value for (value,) in database.run("SELECT value FROM things ORDER BY value")]
    assert values == list(range(THREADS * STATEMENTS))
    database.close()
