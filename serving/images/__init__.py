"""Images in prompts: reads and cuts files, puts rows into prompts (`prompt`), encodes tiles (`encoder`)."""
