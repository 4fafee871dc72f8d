"""LangChain's standard tests for chat models on each of the three APIs, without images, audio and PDF."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from tests.conformance.served import MODEL, Served

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    suites = pytest.importorskip("langchain_tests.integration_tests", exc_type=ImportError)
    langchain_openai = pytest.importorskip("langchain_openai", exc_type=ImportError)
    langchain_anthropic = pytest.importorskip("langchain_anthropic", exc_type=ImportError)

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]


class Suite(suites.ChatModelIntegrationTests):  # type: ignore[misc, name-defined]
    """Settings of all three APIs; `base_url` is set once the server runs."""

    base_url: str

    @pytest.fixture(autouse=True, scope="class")
    def _served(self, request: pytest.FixtureRequest, served: Served) -> None:
        session = f"langchain-{request.cls.__name__}"
        anthropic = request.cls.chat_model_class is langchain_anthropic.ChatAnthropic
        request.cls.base_url = served.anthropic(session) if anthropic else served.openai(session)

    @property
    def supports_json_mode(self) -> bool:
        return self.chat_model_class is langchain_openai.ChatOpenAI


class TestChat(Suite):
    chat_model_class = langchain_openai.ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, "base_url": self.base_url, "api_key": "any", "max_retries": 0, "stream_usage": True}


class TestResponses(Suite):
    chat_model_class = langchain_openai.ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        common = {"model": MODEL, "base_url": self.base_url, "api_key": "any", "max_retries": 0}
        return {**common, "use_responses_api": True}


@pytest.mark.parametrize("served", ["0"], ids=["plain"], indirect=True)  # the suite wants text alone, no thinking
class TestMessages(Suite):
    chat_model_class = langchain_anthropic.ChatAnthropic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, "base_url": self.base_url, "api_key": "any", "max_retries": 0}
