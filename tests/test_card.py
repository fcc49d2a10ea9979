"""The card of a shipped model as the Hub shows it."""

import pytest
from huggingface_hub import ModelCard

from kanerva.evaluation.records import read_record
from kanerva.lab.card import card, hub_card, main
from kanerva.models.loading import PRETRAINED, shipped_versions
from kanerva.runs import read_run_config


@pytest.mark.parametrize("name", shipped_versions())
def test_a_hub_card_has_the_fields_the_hub_reads_and_the_record(name: str):
    record, config = read_record(PRETRAINED / name), read_run_config(PRETRAINED / name)
    read = ModelCard(hub_card(record, config))
    (result,) = read.data.eval_results or []
    assert read.data.library_name == "kanerva" and read.data.license == "apache-2.0"
    assert result.metric_value == pytest.approx(record["bound"]["nll_nats"], abs=1e-4)
    assert (result.dataset_name, result.dataset_split) == (record["data"], "test")
    assert read.text.strip() == card(record, config).strip()


def test_the_command_prints_a_card(capsys: pytest.CaptureFixture[str]):
    assert main(["glyphs"]) == 0
    assert capsys.readouterr().out.startswith("---\n")
    for words in (["nothing"], []):
        assert main(words) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
