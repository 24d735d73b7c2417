//! Implements the gRPC service Models for operators.

use std::sync::Arc;

use prediction::file::Kind;
use proto::v1::{self as wire, models_server};
use tonic::{Code, Request, Response, Status};
use units::limits::OUTCOMES_PER_REQUEST_MAX;

use super::{
    ServiceContext, model_messages, run_to_completion,
    status::{driver_error_status, error_status, invalid_argument},
};
use crate::{
    convert,
    forecasts::{self, ModelError, Training},
};

/// Handlers of the gRPC service Models.
#[derive(Clone, Debug)]
pub struct Models(pub ServiceContext);

type Reply<T> = Result<Response<T>, Status>;

fn parse_kind(kind: wire::ModelKind) -> Result<Kind, Status> {
    model_messages::parse_kind(kind).map_err(invalid_argument)
}

#[tonic::async_trait]
impl models_server::Models for Models {
    async fn add_outcomes(
        &self,
        request: Request<wire::AddOutcomesRequest>,
    ) -> Reply<wire::AddOutcomesResponse> {
        self.0.admit_operator(&request)?;
        let now = self.0.driver.read(|_, when| when.wall).map_err(driver_error_status)?;
        let outcomes = model_messages::parse_outcomes(request.into_inner(), now).map_err(invalid_argument)?;
        let count =
            |outcomes: &Vec<_>| u32::try_from(outcomes.len()).expect("the size of a request is limited");
        let (retention_start, reported) =
            (self.0.forecasts.retention_start().map_err(driver_error_status)?, count(&outcomes));
        let outcomes: Vec<_> =
            outcomes.into_iter().filter(|vm| vm.outcome.ended >= retention_start).collect();
        let recent = count(&outcomes);
        let forecasts = Arc::clone(&self.0.forecasts);
        let added = run_to_completion(async move { forecasts.add_outcomes(outcomes).await })
            .await?
            .map_err(driver_error_status)?;
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
        let limit = page_limit(request.limit);
        let (vms, next_after) =
            self.0.forecasts.list_outcomes(request.after, limit).await.map_err(model_error_status)?;
        let outcomes = vms.into_iter().map(model_messages::outcome_message).collect();
        Ok(Response::new(wire::ListOutcomesResponse { outcomes, next_after }))
    }

    async fn list_measured_moves(
        &self,
        request: Request<wire::ListMeasuredMovesRequest>,
    ) -> Reply<wire::ListMeasuredMovesResponse> {
        self.0.admit_operator(&request)?;
        let request = request.into_inner();
        let limit = page_limit(request.limit);
        let (moves, next_after) =
            self.0.forecasts.list_measured_moves(request.after, limit).await.map_err(model_error_status)?;
        let moves = moves.into_iter().map(model_messages::measured_move_message).collect();
        Ok(Response::new(wire::ListMeasuredMovesResponse { moves, next_after }))
    }

    async fn train_model(&self, request: Request<wire::TrainModelRequest>) -> Reply<wire::Model> {
        self.0.admit_operator(&request)?;
        let request = request.into_inner();
        let with_measured_moves = !request.without_measured_moves;
        let training = match (parse_kind(request.kind())?, request.labels) {
            (Kind::Frigid, None) => Training::Frigid,
            (Kind::Frigid, Some(_)) => {
                let rule = "for a model of frigid memory";
                return Err(invalid_argument(convert::InvalidField::new("labels", "are not allowed", rule)));
            }
            (_, None) => return Err(model_error_status(ModelError::NoLabels)),
            (Kind::Sensitivity, Some(labels)) => {
                Training::Sensitivity(model_messages::parse_labels(labels).map_err(invalid_argument)?)
            }
            (Kind::Loss, Some(labels)) => {
                Training::Loss(model_messages::parse_labelled_runs(labels).map_err(invalid_argument)?)
            }
        };
        let forecasts = Arc::clone(&self.0.forecasts);
        model_reply(
            run_to_completion(async move { forecasts.train(training, with_measured_moves).await })
                .await?
                .map_err(model_error_status)?,
        )
    }

    async fn import_model(&self, request: Request<wire::ImportModelRequest>) -> Reply<wire::Model> {
        self.0.admit_operator(&request)?;
        let request = request.into_inner();
        let kind = parse_kind(request.kind())?;
        let format = model_messages::parse_format(request.format()).map_err(invalid_argument)?;
        let labels =
            request.labels.map(model_messages::parse_labels).transpose().map_err(invalid_argument)?;
        let forecasts = Arc::clone(&self.0.forecasts);
        let imported = async move {
            match format {
                None => forecasts.import_model_file(kind, request.content).await,
                Some(format) => forecasts.import(kind, format, request.content, labels).await,
            }
        };
        model_reply(run_to_completion(imported).await?.map_err(model_error_status)?)
    }

    async fn list_models(
        &self,
        request: Request<wire::ListModelsRequest>,
    ) -> Reply<wire::ListModelsResponse> {
        self.0.admit_operator(&request)?;
        let models =
            self.0.forecasts.list_models().await.into_iter().map(model_messages::model_message).collect();
        self.0.driver.check_leader().map_err(driver_error_status)?;
        Ok(Response::new(wire::ListModelsResponse { models }))
    }

    async fn get_model(&self, request: Request<wire::GetModelRequest>) -> Reply<wire::GetModelResponse> {
        self.0.admit_operator(&request)?;
        let request = request.into_inner();
        let version = Some(request.version).filter(|version| *version > 0);
        let reply = self.0.forecasts.model_with_file(parse_kind(request.kind())?, version).await;
        let (summary, content) = reply.map_err(model_error_status)?;
        self.0.driver.check_leader().map_err(driver_error_status)?;
        let model = Some(model_messages::model_message(summary));
        Ok(Response::new(wire::GetModelResponse { model, content }))
    }

    async fn promote_model(&self, request: Request<wire::PromoteModelRequest>) -> Reply<wire::Model> {
        let actor = self.0.admit_operator(&request)?;
        let request = request.into_inner();
        let kind = parse_kind(request.kind())?;
        let forecasts = Arc::clone(&self.0.forecasts);
        let promoted =
            async move { forecasts.promote(kind, request.version, request.validate_only, actor).await };
        model_reply(run_to_completion(promoted).await?.map_err(model_error_status)?)
    }

    async fn rollback_model(
        &self,
        request: Request<wire::RollbackModelRequest>,
    ) -> Reply<wire::RollbackModelResponse> {
        let actor = self.0.admit_operator(&request)?;
        let kind = parse_kind(request.into_inner().kind())?;
        let forecasts = Arc::clone(&self.0.forecasts);
        let rolled_back = run_to_completion(async move { forecasts.roll_back(kind, actor).await });
        let serving = rolled_back.await?.map_err(model_error_status)?;
        Ok(Response::new(wire::RollbackModelResponse { model: serving.map(model_messages::model_message) }))
    }
}

/// Returns the number of rows in a page. A `limit` of 0 means as many as possible.
fn page_limit(limit: u32) -> usize {
    match limit {
        0 => OUTCOMES_PER_REQUEST_MAX,
        limit => OUTCOMES_PER_REQUEST_MAX.min(limit as usize),
    }
}

fn model_reply(model: forecasts::ModelSummary) -> Reply<wire::Model> {
    Ok(Response::new(model_messages::model_message(model)))
}

fn model_error_status(error: ModelError) -> Status {
    let (code, reason) = match &error {
        ModelError::NoSuchModel { .. } => (Code::NotFound, "MODEL_NOT_FOUND"),
        ModelError::NoServingModel(_) => (Code::FailedPrecondition, "NO_SERVING_MODEL"),
        ModelError::AlreadyServing { .. } => (Code::FailedPrecondition, "MODEL_SERVING"),
        ModelError::Busy => (Code::Unavailable, "TRAINING"),
        ModelError::TooFewOutcomes(_) => (Code::FailedPrecondition, "TOO_FEW_OUTCOMES"),
        ModelError::Evaluation(_)
        | ModelError::NoLabels
        | ModelError::OwnFormatOnly(_)
        | ModelError::File(_)
        | ModelError::OtherKind { .. }
        | ModelError::Import(_) => (Code::InvalidArgument, "BAD_VALUE"),
        ModelError::Driver(_) => (Code::Unavailable, "UNAVAILABLE"),
    };
    match error {
        ModelError::Driver(error) => driver_error_status(error),
        other => error_status(code, reason, units::chain(&other)),
    }
}
