"""Run plans: lower them to programs, run these behind autograd, attach, guard."""
