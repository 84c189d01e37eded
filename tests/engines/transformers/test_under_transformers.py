# SPDX-License-Identifier: Apache-2.0
"""The tests of the adapter for transformers pass in the environment that has transformers."""

from __future__ import annotations

import importlib.util

import pytest

from benches.peers import install
from tests.engines.transformers.environment import FAMILY, run_tests


@pytest.mark.transformers
def test_the_tests_of_the_adapter_pass_where_transformers_is() -> None:
    if importlib.util.find_spec("transformers") is not None:
        pytest.skip("this environment has transformers: the tests run themselves")
    if not install.is_installed(FAMILY):
        pytest.skip(f"transformers is not in {install.home()}: make engines-transformers")
    assert run_tests("-q", "-p", "no:cacheprovider") == 0
