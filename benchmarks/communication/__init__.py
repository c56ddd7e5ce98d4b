"""How fast are collectives and codecs, and what do codecs gain on a slow network?"""
