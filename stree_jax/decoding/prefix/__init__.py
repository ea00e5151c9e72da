"""Texts that go on: what target and drafter have read of some rows, and how they read on.

prefix    `Prefix`: what has been read, in buffers of any size, and by which weights; reads on
prefill   chunk by chunk
slots     rows that start from a prefix, and give one back, while others continue
"""
