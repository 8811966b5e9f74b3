"""The host side: opens models, keeps compiled buckets, plans and answers requests.

`jaxllm` names what of it is public.
"""
