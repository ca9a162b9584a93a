"""What is durable: which checkpoints exist, where the next one goes, and the commit.

It may import: medium and what is below; it knows no engine and no trainer.
"""
