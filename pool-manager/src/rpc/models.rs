//! The service Models.

use prediction::file::Kind;
use proto::v1::{self as wire, models_server};
use tonic::{Code, Request, Response, Status};
use units::limits::{LIST_PAGE_MAX, OUTCOMES_ADDED_MAX};

use super::{
    Shared,
    identity::Role,
    refused::{coded, invalid, refused},
};
use crate::{
    convert,
    forecasts::{ModelError, Training},
};

/// The service Models.
#[derive(Clone, Debug)]
pub struct Models(pub Shared);

type Reply<T> = Result<Response<T>, Status>;

impl Models {
    fn admit<T>(&self, request: &Request<T>) -> Result<(), Status> {
        self.0.identity.admit(request, Role::Admin).map(drop)
    }
}

fn kind(kind: wire::ModelKind) -> Result<Kind, Status> {
    convert::models::kind(kind).map_err(invalid)
}

#[tonic::async_trait]
impl models_server::Models for Models {
    async fn add_outcomes(
        &self,
        request: Request<wire::AddOutcomesRequest>,
    ) -> Reply<wire::AddOutcomesResponse> {
        self.admit(&request)?;
        let outcomes = convert::models::outcomes(request.into_inner()).map_err(invalid)?;
        let told = u32::try_from(outcomes.len()).expect("it was checked");
        let added = self.0.forecasts.add(outcomes).await.map_err(refused)?;
        Ok(Response::new(wire::AddOutcomesResponse { added, known: told - added }))
    }

    async fn list_outcomes(
        &self,
        request: Request<wire::ListOutcomesRequest>,
    ) -> Reply<wire::ListOutcomesResponse> {
        self.admit(&request)?;
        let request = request.into_inner();
        let most = OUTCOMES_ADDED_MAX.min(LIST_PAGE_MAX as usize);
        let limit = if request.limit == 0 { most } else { most.min(request.limit as usize) };
        let (pasts, next_after) =
            self.0.forecasts.outcomes(request.after, limit).await.map_err(|error| status(&error))?;
        let outcomes = pasts.into_iter().map(convert::models::outcome_view).collect();
        Ok(Response::new(wire::ListOutcomesResponse { outcomes, next_after }))
    }

    async fn train_model(&self, request: Request<wire::TrainModelRequest>) -> Reply<wire::Model> {
        self.admit(&request)?;
        let request = request.into_inner();
        let training = match (kind(request.kind())?, request.labels) {
            (Kind::Frigid, None) => Training::Frigid,
            (Kind::Frigid, Some(_)) => {
                let rule = "must not be there for a model of frigid memory";
                return Err(invalid(convert::Invalid::new("labels", "some", rule)));
            }
            (Kind::Sensitivity, labels) => {
                let labels = labels.ok_or_else(|| status(&ModelError::Unlabelled))?;
                Training::Sensitivity(convert::models::labels(labels).map_err(invalid)?)
            }
        };
        show(self.0.forecasts.train(training).await)
    }

    async fn import_model(&self, request: Request<wire::ImportModelRequest>) -> Reply<wire::Model> {
        self.admit(&request)?;
        let request = request.into_inner();
        let kind = kind(request.kind())?;
        let format = convert::models::format(request.format()).map_err(invalid)?;
        let labels = request.labels.map(convert::models::labels).transpose().map_err(invalid)?;
        show(match format {
            None => self.0.forecasts.take(kind, request.content).await,
            Some(format) => self.0.forecasts.import(kind, format, request.content, labels).await,
        })
    }

    async fn list_models(
        &self,
        request: Request<wire::ListModelsRequest>,
    ) -> Reply<wire::ListModelsResponse> {
        self.admit(&request)?;
        let models = self.0.forecasts.models().await.into_iter().map(convert::models::model_view).collect();
        Ok(Response::new(wire::ListModelsResponse { models }))
    }

    async fn get_model(&self, request: Request<wire::GetModelRequest>) -> Reply<wire::GetModelResponse> {
        self.admit(&request)?;
        let request = request.into_inner();
        let version = Some(request.version).filter(|version| *version > 0);
        let found = self.0.forecasts.model(kind(request.kind())?, version).await;
        let (shown, content) = found.map_err(|error| status(&error))?;
        let model = Some(convert::models::model_view(shown));
        Ok(Response::new(wire::GetModelResponse { model, content }))
    }

    async fn promote_model(&self, request: Request<wire::PromoteModelRequest>) -> Reply<wire::Model> {
        self.admit(&request)?;
        let request = request.into_inner();
        let kind = kind(request.kind())?;
        show(self.0.forecasts.promote(kind, request.version, request.validate_only).await)
    }

    async fn rollback_model(
        &self,
        request: Request<wire::RollbackModelRequest>,
    ) -> Reply<wire::RollbackModelResponse> {
        self.admit(&request)?;
        let kind = kind(request.into_inner().kind())?;
        let serves = self.0.forecasts.roll_back(kind).await.map_err(|error| status(&error))?;
        Ok(Response::new(wire::RollbackModelResponse { model: serves.map(convert::models::model_view) }))
    }
}

fn show(made: Result<crate::forecasts::Shown, ModelError>) -> Reply<wire::Model> {
    made.map(|shown| Response::new(convert::models::model_view(shown))).map_err(|error| status(&error))
}

fn status(error: &ModelError) -> Status {
    let (code, reason) = match error {
        ModelError::NoSuchModel { .. } => (Code::NotFound, "MODEL_NOT_FOUND"),
        ModelError::NoneServes(_) => (Code::FailedPrecondition, "NO_MODEL_SERVES"),
        ModelError::Serves { .. } => (Code::FailedPrecondition, "MODEL_SERVES"),
        ModelError::Busy => (Code::Unavailable, "TRAINING"),
        ModelError::TooFew(_) => (Code::FailedPrecondition, "TOO_FEW_OUTCOMES"),
        ModelError::Untold(_)
        | ModelError::Unlabelled
        | ModelError::File(_)
        | ModelError::OtherKind { .. }
        | ModelError::Refused(_) => (Code::InvalidArgument, "BAD_VALUE"),
        ModelError::Asked(_) => (Code::Unavailable, "STORE_FAILED"),
    };
    coded(code, reason, units::chain(error))
}
