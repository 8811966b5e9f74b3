"""The host side: opens models, keeps compiled buckets, plans and answers requests.

`jaxllm` lists its public parts.
"""
