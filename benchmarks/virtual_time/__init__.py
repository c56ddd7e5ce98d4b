"""How far can predictions in virtual time be trusted, and how large may a simulated cluster be?"""
