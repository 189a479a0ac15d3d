"""Retries with growing delays, a dead-letter queue with the whole story, and safe replay for RabbitMQ."""

__version__ = "0.1.0"
