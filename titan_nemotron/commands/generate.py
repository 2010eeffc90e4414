"""`titan-nemotron generate`: a completion of a prompt."""

from pydantic import Field

from titan_nemotron.commands.model import ModelOptions, find_tokenizer
from titan_nemotron.config import load


class GenerateOptions(ModelOptions):
    """Complete a prompt: prints the prompt and what the model adds to it."""

    prompt: str = Field(description="Text to complete.")
    max_new_tokens: int = Field(128, ge=0, description="Tokens to add at most.")
    temperature: float = Field(1.0, ge=0, description="Divides the logits; 0 always takes the likeliest token.")
    top_p: float = Field(
        1.0, gt=0, le=1, description="Sample among the fewest tokens that have this probability together."
    )
    seed: int = Field(0, description="Seed of the sampling; the same seed gives the same text.")
    stop: list[str] = Field([], description="End before any of these texts, besides the end of the document.")
    tokenizer: str | None = Field(
        None, description="Tokenizer file or directory, where the checkpoint has none beside it."
    )


def run(arguments: list[str]) -> None:
    """Continue a prompt and print the text as it comes."""
    options = load(GenerateOptions, None, arguments, "titan-nemotron generate")
    tokenizer = find_tokenizer(options.checkpoint, options.tokenizer)

    from titan_nemotron.generation.decode import generate
    from titan_nemotron.generation.sampling import Sampling

    model = options.model()
    prompt = tokenizer.encode([options.prompt])[0] or [tokenizer.eos_id]

    def ends(tokens: list[int]) -> bool:
        return first_stop(tokenizer.decode(tokens), options.stop) is not None

    sampling = Sampling(
        temperature=options.temperature,
        top_p=options.top_p,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
        stop_ids=(tokenizer.eos_id,),
    )
    completion = generate(model, [prompt], sampling, stop=ends if options.stop else None)[0]
    new = [token for token in completion.tokens if token != tokenizer.eos_id]
    text = tokenizer.decode(new)
    print(options.prompt + text[: first_stop(text, options.stop)])


def first_stop(text: str, stops: list[str]) -> int | None:
    """Where the first of the stop texts begins, None where there is none."""
    return min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)
