"""instructor: typed answers by tools, by JSON schemas and by responses, whole and in parts."""

import sys

import anthropic
import instructor
import openai
from pydantic import BaseModel

URL, ASKED = sys.argv[1], [{"role": "user", "content": "What is the weather in Paris?"}]


class Report(BaseModel):
    city: str
    degrees: int


EXPECTED = {"city": "Paris", "degrees": 21}
Mode = instructor.Mode
for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS):
    client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key="none"), mode=mode)
    more = {} if mode is Mode.RESPONSES_TOOLS else {"reasoning_effort": "high"}
    report, raw = client.chat.completions.create_with_completion(
        model="default", messages=ASKED, response_model=Report, max_retries=1, **more
    )
    assert report.model_dump() == EXPECTED, (mode, report)
    if mode is not Mode.RESPONSES_TOOLS:
        assert raw.choices[0].message.reasoning_content == "They ask for the weather.", (mode, raw)
        *_, last = client.chat.completions.create_partial(
            model="default", messages=ASKED, response_model=Report, **more
        )
        assert last.model_dump() == EXPECTED, (mode, last)
client = instructor.from_anthropic(
    anthropic.Anthropic(base_url=URL, api_key="none"), mode=Mode.ANTHROPIC_TOOLS
)
report = client.chat.completions.create(
    model="default", messages=ASKED, response_model=Report, max_tokens=900, max_retries=1
)
assert report.model_dump() == EXPECTED, report
