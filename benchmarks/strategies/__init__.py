"""What does each strategy gain in speed, and what does it cost in accuracy?"""
