"""Serves two apps with one elastic model: each has its objective, each answer says how it was planned.

python examples/service.py
"""

from jaxllm import Latency, LLMService, Slo

REVIEWS = ("A warm, funny film that I would watch again.", "Two hours that I will never get back.")
QUESTION = "Is this review positive or negative?"

service = LLMService.open()  # the packaged elastic model; profiles this device once
# Milliseconds, or percent of the whole model's times here: to the first token, per further token.
service.bind("mail", Latency(ttft_ms=200, tpot_ms=100))
service.bind("keyboard", Slo.parse("<60,80>"))

for app in ("mail", "keyboard"):
    for review in REVIEWS:
        answer = service.call(review, app=app, instruction=QUESTION).result()
        plan, cost = answer.plan, answer.cost
        print(f"{app:8}  {answer.text:8}  level {plan.level} %, {len(plan.kept)} tokens kept,", end=" ")
        print(f"first token after {cost.ttft_ms:.1f} ms, {'in time' if answer.met else 'late'}")

for objective, lengths in service.unmet().items():
    print(f"{objective} cannot be met here by prompts of {', '.join(map(str, lengths))} tokens")
service.close()
