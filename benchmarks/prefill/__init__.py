"""What integer prefill saves and costs, beside other ways to quantize activations and to order the work."""
