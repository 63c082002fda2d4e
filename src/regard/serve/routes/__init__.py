"""The routes of the server, a module for each group."""

from regard.serve.routes import chat, completions, operation, responses, tasks

ROUTERS = [module.router for module in (operation, completions, chat, responses, tasks)]
