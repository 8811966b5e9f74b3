"""Images in prompts: reads files (`files`), cuts them (`tiles`), encodes them (`encoder`), and puts their
rows into prompts (`prompt`, `messages`)."""
