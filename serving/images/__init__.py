"""Images in prompts: reads and cuts files (`files`), encodes tiles (`encoder`), and puts rows into prompts
(`prompt`)."""
