"""The trace formats that tailopt reads, one file each. A new one is a file here and a line in ``FORMATS``."""

from tailopt.trace.format import Format
from tailopt.trace.formats.azure2023 import AZURE2023
from tailopt.trace.formats.burstgpt import BURSTGPT
from tailopt.trace.formats.csv import CSV
from tailopt.trace.formats.mooncake import MOONCAKE
from tailopt.trace.formats.openai_batch import OPENAI_BATCH
from tailopt.trace.formats.parquet import PARQUET
from tailopt.trace.formats.slime import SLIME
from tailopt.trace.formats.verl import VERL
from tailopt.trace.formats.vidur import VIDUR
from tailopt.trace.formats.vllm_bench import VLLM_BENCH

FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        PARQUET,
        CSV,
        AZURE2023,
        BURSTGPT,
        MOONCAKE,
        VIDUR,
        VLLM_BENCH,
        VERL,
        SLIME,
        OPENAI_BATCH,
    )
}
"""Every format by name; the first whose ``detect`` answers yes reads a file."""
