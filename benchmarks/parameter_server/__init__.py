"""How fast is the parameter server, and does it survive failures?"""
