//! Implements the gRPC service Models for operators.

use std::sync::Arc;

use prediction::file::Kind;
use proto::v1::{self as wire, models_server};
use tonic::{Code, Request, Response, Status};
use units::limits::OUTCOMES_PER_REQUEST_MAX;

use super::{
    Shared, model_messages, run_to_completion,
    status::{coded, driver_error, invalid},
};
use crate::{
    convert,
    forecasts::{self, ModelError, Training},
};

/// Handlers of the gRPC service Models.
#[derive(Clone, Debug)]
pub struct Models(pub Shared);

type Reply<T> = Result<Response<T>, Status>;

fn kind(kind: wire::ModelKind) -> Result<Kind, Status> {
    model_messages::kind(kind).map_err(invalid)
}

#[tonic::async_trait]
impl models_server::Models for Models {
    async fn add_outcomes(
        &self,
        request: Request<wire::AddOutcomesRequest>,
    ) -> Reply<wire::AddOutcomesResponse> {
        self.0.admit_operator(&request)?;
        let now = self.0.driver.read(|_, when| when.wall).map_err(driver_error)?;
        let outcomes = model_messages::outcomes(request.into_inner(), now).map_err(invalid)?;
        let count =
            |outcomes: &Vec<_>| u32::try_from(outcomes.len()).expect("the size of a request is limited");
        let (retention_start, reported) =
            (self.0.forecasts.retention_start().map_err(driver_error)?, count(&outcomes));
        let outcomes: Vec<_> =
            outcomes.into_iter().filter(|vm| vm.outcome.ended >= retention_start).collect();
        let recent = count(&outcomes);
        let forecasts = Arc::clone(&self.0.forecasts);
        let added = run_to_completion(async move { forecasts.add_outcomes(outcomes).await })
            .await?
            .map_err(driver_error)?;
        Ok(Response::new(wire::AddOutcomesResponse {
            added,
            duplicates: recent - added,
            too_old: reported - recent,
        }))
    }

    async fn list_outcomes(
        &self,
        request: Request<wire::ListOutcomesRequest>,
    ) -> Reply<wire::ListOutcomesResponse> {
        self.0.admit_operator(&request)?;
        let request = request.into_inner();
        let max = OUTCOMES_PER_REQUEST_MAX;
        let limit = if request.limit == 0 { max } else { max.min(request.limit as usize) };
        let (vms, next_after) = self.0.forecasts.outcomes(request.after, limit).await.map_err(status)?;
        let outcomes = vms.into_iter().map(model_messages::outcome_message).collect();
        Ok(Response::new(wire::ListOutcomesResponse { outcomes, next_after }))
    }

    async fn train_model(&self, request: Request<wire::TrainModelRequest>) -> Reply<wire::Model> {
        self.0.admit_operator(&request)?;
        let request = request.into_inner();
        let training = match (kind(request.kind())?, request.labels) {
            (Kind::Frigid, None) => Training::Frigid,
            (Kind::Frigid, Some(_)) => {
                let rule = "for a model of frigid memory";
                return Err(invalid(convert::Invalid::new("labels", "are not allowed", rule)));
            }
            (Kind::Sensitivity, labels) => {
                let labels = labels.ok_or_else(|| status(ModelError::NoLabels))?;
                Training::Sensitivity(model_messages::labels(labels).map_err(invalid)?)
            }
        };
        let forecasts = Arc::clone(&self.0.forecasts);
        reply(run_to_completion(async move { forecasts.train(training).await }).await?.map_err(status)?)
    }

    async fn import_model(&self, request: Request<wire::ImportModelRequest>) -> Reply<wire::Model> {
        self.0.admit_operator(&request)?;
        let request = request.into_inner();
        let kind = kind(request.kind())?;
        let format = model_messages::format(request.format()).map_err(invalid)?;
        let labels = request.labels.map(model_messages::labels).transpose().map_err(invalid)?;
        let forecasts = Arc::clone(&self.0.forecasts);
        let imported = async move {
            match format {
                None => forecasts.import_file(kind, request.content).await,
                Some(format) => forecasts.import(kind, format, request.content, labels).await,
            }
        };
        reply(run_to_completion(imported).await?.map_err(status)?)
    }

    async fn list_models(
        &self,
        request: Request<wire::ListModelsRequest>,
    ) -> Reply<wire::ListModelsResponse> {
        self.0.admit_operator(&request)?;
        let models = self.0.forecasts.models().await.into_iter().map(model_messages::model_message).collect();
        Ok(Response::new(wire::ListModelsResponse { models }))
    }

    async fn get_model(&self, request: Request<wire::GetModelRequest>) -> Reply<wire::GetModelResponse> {
        self.0.admit_operator(&request)?;
        let request = request.into_inner();
        let version = Some(request.version).filter(|version| *version > 0);
        let reply = self.0.forecasts.model(kind(request.kind())?, version).await;
        let (summary, content) = reply.map_err(status)?;
        let model = Some(model_messages::model_message(summary));
        Ok(Response::new(wire::GetModelResponse { model, content }))
    }

    async fn promote_model(&self, request: Request<wire::PromoteModelRequest>) -> Reply<wire::Model> {
        let actor = self.0.admit_operator(&request)?;
        let request = request.into_inner();
        let kind = kind(request.kind())?;
        let forecasts = Arc::clone(&self.0.forecasts);
        let promoted =
            async move { forecasts.promote(kind, request.version, request.validate_only, actor).await };
        reply(run_to_completion(promoted).await?.map_err(status)?)
    }

    async fn rollback_model(
        &self,
        request: Request<wire::RollbackModelRequest>,
    ) -> Reply<wire::RollbackModelResponse> {
        let actor = self.0.admit_operator(&request)?;
        let kind = kind(request.into_inner().kind())?;
        let forecasts = Arc::clone(&self.0.forecasts);
        let rolled_back = run_to_completion(async move { forecasts.roll_back(kind, actor).await });
        let serving = rolled_back.await?.map_err(status)?;
        Ok(Response::new(wire::RollbackModelResponse { model: serving.map(model_messages::model_message) }))
    }
}

fn reply(model: forecasts::ModelSummary) -> Reply<wire::Model> {
    Ok(Response::new(model_messages::model_message(model)))
}

fn status(error: ModelError) -> Status {
    let (code, reason) = match &error {
        ModelError::NoSuchModel { .. } => (Code::NotFound, "MODEL_NOT_FOUND"),
        ModelError::NoServingModel(_) => (Code::FailedPrecondition, "NO_SERVING_MODEL"),
        ModelError::AlreadyServing { .. } => (Code::FailedPrecondition, "MODEL_SERVING"),
        ModelError::Busy => (Code::Unavailable, "TRAINING"),
        ModelError::TooFewOutcomes(_) => (Code::FailedPrecondition, "TOO_FEW_OUTCOMES"),
        ModelError::Evaluation(_)
        | ModelError::NoLabels
        | ModelError::File(_)
        | ModelError::OtherKind { .. }
        | ModelError::Import(_) => (Code::InvalidArgument, "BAD_VALUE"),
        ModelError::Driver(_) => (Code::Unavailable, "UNAVAILABLE"),
    };
    match error {
        ModelError::Driver(error) => driver_error(error),
        other => coded(code, reason, units::chain(&other)),
    }
}
