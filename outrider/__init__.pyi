from outrider.llm.adapters import LoRARequest as LoRARequest
from outrider.llm.llm import LLM as LLM
from outrider.llm.outputs import CompletionOutput as CompletionOutput
from outrider.llm.outputs import Logprob as Logprob
from outrider.llm.outputs import RequestOutput as RequestOutput
from outrider.llm.prompts import TokensPrompt as TokensPrompt
from outrider.llm.sampling_params import SamplingParams as SamplingParams
from outrider.llm.sampling_params import StructuredOutputsParams as StructuredOutputsParams

__version__: str
