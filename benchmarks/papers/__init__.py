"""Do the papers' claims hold here? Each paper's figure beside ours, measured in virtual time."""
