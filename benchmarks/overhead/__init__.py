"""What does attaching a strategy cost?"""
