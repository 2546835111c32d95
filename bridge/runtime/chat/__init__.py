"""Conversations: their prompts by a chat template, and the parts of the replies, which may call tools."""
