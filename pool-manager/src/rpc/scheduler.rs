//! Implements the gRPC service Scheduler.

use std::{sync::Arc, time::Instant};

use pool::{
    audit::Actor,
    manager::{Manager, Request as PoolRequest, RequestReply},
    record::MigrationAnswer,
};
use proto::v1::{self as wire, scheduler_server};
use tonic::{Request, Response, Status};
use units::Name;
use units::limits::WAIT_READY_TIMEOUT_MAX;

use super::{
    ServiceContext, run_to_completion,
    status::{driver_error_status, invalid_argument, rehome_forbidden_status},
    watch_stream::{MessageStream, watch_objects},
};
use crate::{
    config::RehomePolicy,
    convert::{self, InvalidField},
    plan,
    role::Role,
    shares::SetWeightsError,
};

/// Handlers of the gRPC service Scheduler.
#[derive(Clone, Debug)]
pub struct Scheduler(pub ServiceContext);

type Reply<T> = Result<Response<T>, Status>;

impl Scheduler {
    fn admit<T>(&self, request: &Request<T>) -> Result<Option<Name>, Status> {
        self.0.identity.admit(request, Role::Scheduler)
    }

    async fn request_reservation(&self, request: PoolRequest) -> Reply<wire::Reservation> {
        match self.0.driver.request(request).await.map_err(driver_error_status)? {
            RequestReply::Reservation(view) => Ok(Response::new(convert::reservation_message(view))),
            other => Err(unexpected_reply_status(&other)),
        }
    }
}

/// Returns the status for a reply of the wrong type. The driver sends such a reply only because of
/// a bug.
pub(super) fn unexpected_reply_status(reply: &RequestReply) -> Status {
    Status::internal(format!("internal error: unexpected reply {reply:?}"))
}

fn client_actor(certified: Option<Name>) -> Actor {
    Actor::Client(certified.unwrap_or_else(|| Name::new("scheduler").expect("a name")))
}

#[tonic::async_trait]
impl scheduler_server::Scheduler for Scheduler {
    async fn plan_vm(&self, request: Request<wire::PlanVmRequest>) -> Reply<wire::PlanVmResponse> {
        let actor = client_actor(self.admit(&request)?);
        let plan = convert::parse_plan(request.into_inner()).map_err(invalid_argument)?;
        let started = Instant::now();
        let share = self.0.policy.borrow().pool_share;
        let mut forecast = self.0.forecasts.predict(&plan).map_err(driver_error_status)?;
        let split_decision = plan::decide_split(&plan, &forecast, share);
        forecast.start.pool_only = split_decision.pool_only;
        let split = split_decision.split;
        let reply = self.0.driver.read(|manager, when| (plan::candidates(manager, split), when.wall));
        let (candidates, now) = reply.map_err(driver_error_status)?;
        let (response, decision) = plan::plan(&plan, split_decision, candidates, now, actor);
        self.0.driver.request(PoolRequest::RecordDecision(decision)).await.map_err(driver_error_status)?;
        self.0.forecasts.record_plan(&plan.vm, forecast.start);
        self.0.metrics.plan_seconds.observe(started.elapsed().as_secs_f64());
        Ok(Response::new(response))
    }

    async fn reserve(&self, request: Request<wire::ReserveRequest>) -> Reply<wire::Reservation> {
        let started = Instant::now();
        let certified = self.admit(&request)?;
        let request = request.into_inner();
        let (validate_only, wait_ready) = (request.validate_only, request.wait_ready);
        let commit_within = self.0.policy.borrow().commit_within;
        let reserve =
            convert::parse_reserve(request, certified.as_ref(), commit_within).map_err(invalid_argument)?;
        if validate_only {
            return self.request_reservation(PoolRequest::Validate(reserve)).await;
        }
        let wait = wait_ready.then_some(WAIT_READY_TIMEOUT_MAX);
        let reply = self.request_reservation(PoolRequest::Reserve { reserve, wait }).await;
        if !wait_ready {
            self.0.metrics.reserve_seconds.observe(started.elapsed().as_secs_f64());
        }
        reply
    }

    async fn wait_ready(&self, request: Request<wire::WaitReadyRequest>) -> Reply<wire::Reservation> {
        self.admit(&request)?;
        let request = request.into_inner();
        let target = convert::parse_reservation_ref(request.target).map_err(invalid_argument)?;
        let within = convert::parse_timeout(request.timeout_ms).map_err(invalid_argument)?;
        self.request_reservation(PoolRequest::WaitReady { target, within }).await
    }

    async fn commit(&self, request: Request<wire::CommitRequest>) -> Reply<wire::Reservation> {
        let actor = client_actor(self.admit(&request)?);
        let target = convert::parse_reservation_ref(request.into_inner().target).map_err(invalid_argument)?;
        self.request_reservation(PoolRequest::Commit { target, actor }).await
    }

    async fn release(&self, request: Request<wire::ReleaseRequest>) -> Reply<wire::Reservation> {
        let actor = client_actor(self.admit(&request)?);
        let request = request.into_inner();
        let force = request.force;
        if force && request.reason.is_empty() {
            return Err(invalid_argument(InvalidField::new("reason", "is empty:", "required with force")));
        }
        let reason = convert::check_reason("reason", request.reason).map_err(invalid_argument)?;
        let target = convert::parse_reservation_ref(request.target).map_err(invalid_argument)?;
        self.request_reservation(PoolRequest::Release { target, force, reason, actor }).await
    }

    async fn rehome_vm(&self, request: Request<wire::RehomeVmRequest>) -> Reply<wire::Reservation> {
        let actor = client_actor(self.admit(&request)?);
        let wire::RehomeVmRequest { target, cancel } = request.into_inner();
        let target = convert::parse_reservation_ref(target).map_err(invalid_argument)?;
        if cancel {
            return self.request_reservation(PoolRequest::CancelRehome { target, actor }).await;
        }
        if *self.0.rehome.borrow() == RehomePolicy::Never {
            return Err(rehome_forbidden_status());
        }
        self.request_reservation(PoolRequest::Rehome { target, actor, is_automatic: false }).await
    }

    type WatchCapacityStream = MessageStream<wire::Capacity>;

    async fn watch_capacity(
        &self,
        request: Request<wire::WatchCapacityRequest>,
    ) -> Reply<Self::WatchCapacityStream> {
        self.admit(&request)?;
        watch_objects(&self.0, convert::capacity, |view| vec![view.into()])
    }

    type WatchMigrationsStream = MessageStream<wire::Migration>;

    async fn watch_migrations(
        &self,
        request: Request<wire::WatchMigrationsRequest>,
    ) -> Reply<Self::WatchMigrationsStream> {
        self.admit(&request)?;
        let migrations = |manager: &Manager| convert::migration_list(manager, manager.durable().migrations());
        watch_objects(&self.0, migrations, Vec::from)
    }

    async fn resolve_migration(
        &self,
        request: Request<wire::ResolveMigrationRequest>,
    ) -> Reply<wire::Migration> {
        let actor = client_actor(self.admit(&request)?);
        let request = request.into_inner();
        let answer = match request.state() {
            wire::MigrationState::Accepted => MigrationAnswer::Accepted,
            wire::MigrationState::Declined => MigrationAnswer::Declined,
            wire::MigrationState::Done => MigrationAnswer::Done,
            wire::MigrationState::Open
            | wire::MigrationState::Withdrawn
            | wire::MigrationState::Unspecified => {
                let rule = "must be ACCEPTED, DECLINED or DONE";
                return Err(invalid_argument(InvalidField::new(
                    "state",
                    request.state().as_str_name(),
                    rule,
                )));
            }
        };
        let vm = convert::parse_name("vm", &request.vm).map_err(invalid_argument)?;
        let id = convert::parse_migration_id(&request.id).map_err(invalid_argument)?;
        let explanation = convert::check_reason("answer", request.answer).map_err(invalid_argument)?;
        let reply = self
            .0
            .driver
            .request(PoolRequest::ResolveMigration { vm, id, answer, explanation, actor })
            .await
            .map_err(driver_error_status)?;
        let RequestReply::Migration(id, migration) = reply else {
            return Err(unexpected_reply_status(&reply));
        };
        let message = self
            .0
            .driver
            .read(move |manager, _| convert::migration_list(manager, std::iter::once((id, &migration))));
        let messages: Vec<wire::Migration> = message.map_err(driver_error_status)?.into();
        messages
            .into_iter()
            .next()
            .map(Response::new)
            .ok_or_else(|| Status::internal("internal error: no request"))
    }

    async fn set_weights(
        &self,
        request: Request<wire::SetWeightsRequest>,
    ) -> Reply<wire::SetWeightsResponse> {
        let actor = client_actor(self.admit(&request)?);
        let request = request.into_inner();
        let host = convert::parse_name("host", &request.host).map_err(invalid_argument)?;
        let changes = convert::shares::parse_weight_changes(request.weights).map_err(invalid_argument)?;
        let shares = Arc::clone(&self.0.shares);
        let result =
            run_to_completion(async move { shares.set_weights(&host, changes, actor).await }).await?;
        let weights = result.map_err(|error| match error {
            SetWeightsError::Invalid(error) => invalid_argument(error),
            SetWeightsError::Driver(error) => driver_error_status(error),
        })?;
        Ok(Response::new(wire::SetWeightsResponse { weights: convert::shares::weight_messages(&weights) }))
    }
}
