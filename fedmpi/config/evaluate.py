"""The section `evaluate`: how good the model is, and which one is the best."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from fedmpi.config.sections import Section, ShortSection
from fedmpi.config.values import Count, Name, NonNegative, Protocol, each_once


class BestSettings(ShortSection):
    """A model that is chosen on the validation rows: model-best.safetensors. A bare text is the metric."""

    short = "metric"
    # "loss" or a metric of the task: of the global model on the rows that data.validation holds out at all clients,
    # in each evaluation (where parts of the model stay with clients, or clients have models of their own and no
    # protocol looks at the global one, of what each client uses on its own rows)
    metric: Name | None = None
    goal: Literal["auto", "lowest", "highest"] = "auto"  # auto: lowest of loss, mse and what has these in its name
    patience: Count | None = None  # evaluations in a row without a better model, after which the run ends; null: any
    min_delta: NonNegative = 0.0  # by how much more than that a model must be better than the best one so far

    @model_validator(mode="after")
    def _of_a_metric(self) -> "BestSettings":
        if self.metric is None:
            given = next((key for key, value in self if value != type(self).model_fields[key].default), None)
            if given:
                raise ValueError(f"{given}: {getattr(self, given)} has no effect without a metric; name it")
        return self


class EvaluateSettings(Section):
    every: Count = 1  # rounds; the last round is always evaluated
    # global model on the whole test set; sites: the global model on the test rows of each site of the data set;
    # personal: each client's model on its own test rows; personal_on_global: these models on the whole test set;
    # ft(EPOCHS): personal after so many epochs of fine-tuning, after the last round only
    protocol: Annotated[tuple[Protocol, ...], Field(min_length=1), AfterValidator(each_once)] = ("global",)
    batch_size: Count = 100  # samples
    best: BestSettings = BestSettings()  # model-best.safetensors, chosen on validation rows; a bare text is the metric
