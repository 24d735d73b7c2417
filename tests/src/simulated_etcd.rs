//! Server with the part of etcd's API that Tarn uses, for tests of lost and late messages. It keeps all revisions in memory.
//! Other tests use a real etcd.
//!
//! A faulty call is lost before or after it had its effect, or is delivered later, once or twice. The client gets
//! UNAVAILABLE, as from a member whose connection breaks. Leases end only when the test ends them.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    thread::JoinHandle,
};

use etcd::messages::{
    CompactionRequest, CompactionResponse, Compare, DeleteRangeRequest, DeleteRangeResponse, KeyValue,
    LeaseGrantRequest, LeaseGrantResponse, LeaseKeepAliveRequest, LeaseKeepAliveResponse, LeaseRevokeRequest,
    LeaseRevokeResponse, PutRequest, PutResponse, RangeRequest, RangeResponse, RequestOp, ResponseHeader,
    ResponseOp, StatusRequest, StatusResponse, TxnRequest, TxnResponse,
    compare::{CompareResult, CompareTarget, TargetUnion},
    kv_server::{Kv, KvServer},
    lease_server::{Lease, LeaseServer},
    maintenance_server::{Maintenance, MaintenanceServer},
    request_op::Request as Operation,
    response_op::Response as Outcome,
};
use prost::Message as _;
use rand::{Rng as _, SeedableRng as _};
use rand_pcg::Pcg64;
use tokio::sync::oneshot;
use tokio_stream::{Once, StreamExt as _};
use tonic::{
    Request, Response, Status, Streaming,
    transport::{Server, server::TcpIncoming},
};

/// Maximum number of operations in a transaction, as of etcd.
const OPERATIONS_MAX: usize = 128;
/// Maximum size of a request, as of etcd.
const REQUEST_BYTES_MAX: usize = 3 << 19;
/// Fraction of the calls after which a late transaction is delivered, if there is one.
const LATE_DELIVERY_RATE: f64 = 0.05;
/// Fraction of delivered late transactions that are delivered again.
const REPEATED_DELIVERY_RATE: f64 = 0.5;

/// Running server. It stops when it is dropped.
#[derive(Debug)]
pub struct SimulatedEtcd {
    shared: Arc<Mutex<State>>,
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Numbers of faults since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultCounts {
    /// Calls that had no effect.
    pub lost_calls: u64,
    /// Calls that had an effect, but no answer.
    pub lost_answers: u64,
    /// Transactions that were delivered after their client had got UNAVAILABLE.
    pub late_calls: u64,
}

#[derive(Debug)]
struct State {
    keys: Keys,
    random: Pcg64,
    fault_rate: f64,
    /// Transactions that will be delivered later.
    late: Vec<TxnRequest>,
    faults: FaultCounts,
}

/// Fault of a call.
enum Fault {
    None,
    LostCall,
    LostAnswer,
    LateCall,
}

impl SimulatedEtcd {
    /// Starts a server on a free port, whose faults follow from the seed. `fault_rate` is the fraction of faulty calls.
    ///
    /// # Panics
    /// Panics if no thread or socket can be created.
    pub fn start(seed: u64, fault_rate: f64) -> Self {
        let state = State {
            keys: Keys::default(),
            random: Pcg64::seed_from_u64(seed),
            fault_rate,
            late: Vec::new(),
            faults: FaultCounts::default(),
        };
        let shared = Arc::new(Mutex::new(state));
        let (service, (stop, stopped), (ready, address)) =
            (Service(Arc::clone(&shared)), oneshot::channel::<()>(), mpsc::channel());
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime is created").block_on(async move {
                let incoming = TcpIncoming::bind((Ipv4Addr::LOCALHOST, 0).into()).expect("a port is free");
                let address = incoming.local_addr().expect("the socket has an address");
                ready.send(address).expect("the test waits for the address");
                let server = Server::builder()
                    .add_service(KvServer::new(service.clone()).max_decoding_message_size(REQUEST_BYTES_MAX))
                    .add_service(LeaseServer::new(service.clone()))
                    .add_service(MaintenanceServer::new(service));
                let stopped = async move { drop(stopped.await) };
                server.serve_with_incoming_shutdown(incoming, stopped).await.expect("the server runs");
            });
        });
        let address = address.recv().expect("the server starts");
        Self { shared, address, stop: Some(stop), thread: Some(thread) }
    }

    /// Returns the address for clients, as a URI.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Ends all leases, and deletes their entries.
    pub fn end_leases(&self) {
        let mut state = lock(&self.shared);
        let leases: Vec<i64> = state.keys.leases.keys().copied().collect();
        leases.into_iter().for_each(|lease| drop(state.keys.revoke(lease)));
    }

    /// Returns the number of faults so far.
    pub fn faults(&self) -> FaultCounts {
        lock(&self.shared).faults
    }
}

impl Drop for SimulatedEtcd {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic of the server was printed, and has failed the calls of the test
        }
    }
}

fn lock(shared: &Mutex<State>) -> MutexGuard<'_, State> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    fn next_fault(&mut self) -> Fault {
        self.deliver_late_call();
        if !self.random.random_bool(self.fault_rate) {
            return Fault::None;
        }
        match self.random.random_range(0..3) {
            0 => {
                self.faults.lost_calls += 1;
                Fault::LostCall
            }
            1 => {
                self.faults.lost_answers += 1;
                Fault::LostAnswer
            }
            _ => Fault::LateCall,
        }
    }

    fn deliver_late_call(&mut self) {
        if self.late.is_empty() || !self.random.random_bool(LATE_DELIVERY_RATE) {
            return;
        }
        let chosen = self.random.random_range(0..self.late.len());
        let request = self.late.swap_remove(chosen);
        if self.random.random_bool(REPEATED_DELIVERY_RATE) {
            self.late.push(request.clone());
        }
        self.faults.late_calls += 1;
        let _ = self.keys.transact(&request); // nobody waits for the answer
    }

    /// Performs a call, or a fault in its place.
    fn call<R>(
        &mut self,
        perform: impl FnOnce(&mut Keys) -> Result<R, Status>,
    ) -> Result<Response<R>, Status> {
        match self.next_fault() {
            Fault::None => perform(&mut self.keys).map(Response::new),
            Fault::LostAnswer => perform(&mut self.keys).and_then(|_| Err(unavailable())),
            Fault::LostCall | Fault::LateCall => Err(unavailable()),
        }
    }
}

fn unavailable() -> Status {
    Status::unavailable("simulated fault")
}

fn lease_not_found() -> Status {
    Status::not_found("etcdserver: requested lease not found")
}

/// Entries of all revisions, and leases.
#[derive(Debug, Default)]
struct Keys {
    revision: i64,
    compacted: i64,
    /// States of each key in ascending order of their revisions; `None` if the entry was deleted.
    entries: BTreeMap<Vec<u8>, Vec<(i64, Option<KeyValue>)>>,
    /// Times to live of the leases.
    leases: BTreeMap<i64, i64>,
    leases_granted: i64,
}

impl Keys {
    fn header(&self) -> Option<ResponseHeader> {
        Some(ResponseHeader { revision: self.revision, ..ResponseHeader::default() })
    }

    /// Returns the entries of a range in a revision, as etcd defines ranges: an empty end stands for one key, and the
    /// byte 0 for all following keys.
    fn find(&self, key: &[u8], range_end: &[u8], revision: i64) -> Vec<&KeyValue> {
        let is_in_range = |found: &[u8]| match range_end {
            [] => found == key,
            [0] => true,
            end => found < end,
        };
        let from_key = self.entries.range(key.to_vec()..).take_while(|(found, _)| is_in_range(found));
        let state = |states: &'_ Vec<(i64, Option<KeyValue>)>| {
            let index = states.partition_point(|(written, _)| *written <= revision);
            index.checked_sub(1)
        };
        from_key.filter_map(|(_, states)| states[state(states)?].1.as_ref()).collect()
    }

    fn get(&self, key: &[u8]) -> Option<&KeyValue> {
        self.find(key, &[], self.revision).pop()
    }

    fn range(&self, request: &RangeRequest) -> Result<RangeResponse, Status> {
        let revision = if request.revision > 0 { request.revision } else { self.revision };
        if revision > self.revision {
            return Err(Status::out_of_range("etcdserver: mvcc: required revision is a future revision"));
        }
        if request.revision > 0 && revision < self.compacted {
            return Err(Status::out_of_range("etcdserver: mvcc: required revision has been compacted"));
        }
        let found = self.find(&request.key, &request.range_end, revision);
        let limit = usize::try_from(request.limit).ok().filter(|limit| *limit > 0).unwrap_or(usize::MAX);
        let count = i64::try_from(found.len()).expect("the number of entries fits i64");
        let mut kvs: Vec<KeyValue> = found.into_iter().take(limit).cloned().collect();
        if request.keys_only {
            kvs.iter_mut().for_each(|entry| entry.value.clear());
        }
        let more = kvs.len() < usize::try_from(count).expect("the count is positive");
        Ok(RangeResponse { header: self.header(), kvs, more, count })
    }

    fn holds(&self, compare: &Compare) -> bool {
        assert_eq!(compare.result(), CompareResult::Equal, "Tarn uses no other comparison");
        let entry = self.get(&compare.key);
        match (compare.target(), &compare.target_union) {
            (CompareTarget::Create, Some(TargetUnion::CreateRevision(expected))) => {
                entry.map_or(0, |entry| entry.create_revision) == *expected
            }
            (CompareTarget::Mod, Some(TargetUnion::ModRevision(expected))) => {
                entry.map_or(0, |entry| entry.mod_revision) == *expected
            }
            other => panic!("Tarn does not compare {other:?}"),
        }
    }

    /// Performs a transaction, all of whose writes have one new revision.
    fn transact(&mut self, request: &TxnRequest) -> Result<TxnResponse, Status> {
        if request.success.len().max(request.failure.len()) > OPERATIONS_MAX {
            return Err(Status::invalid_argument("etcdserver: too many operations in txn request"));
        }
        if request.encoded_len() > REQUEST_BYTES_MAX {
            return Err(Status::invalid_argument("etcdserver: request is too large"));
        }
        let succeeded = request.compare.iter().all(|compare| self.holds(compare));
        let operations = if succeeded { &request.success } else { &request.failure };
        let has_lease = |operation: &RequestOp| match &operation.request {
            Some(Operation::RequestPut(put)) => put.lease == 0 || self.leases.contains_key(&put.lease),
            _ => true,
        };
        if !operations.iter().all(has_lease) {
            return Err(lease_not_found());
        }
        let revision = self.revision + 1;
        let responses = operations.iter().map(|operation| self.perform(operation, revision));
        let responses = responses.collect::<Result<Vec<_>, _>>()?;
        Ok(TxnResponse { header: self.header(), succeeded, responses })
    }

    fn perform(&mut self, operation: &RequestOp, revision: i64) -> Result<ResponseOp, Status> {
        let outcome = match operation.request.as_ref().expect("an operation has a kind") {
            Operation::RequestRange(range) => Outcome::ResponseRange(self.range(range)?),
            Operation::RequestPut(put) => Outcome::ResponsePut(self.put(put, revision)),
            Operation::RequestDeleteRange(range) => {
                Outcome::ResponseDeleteRange(self.delete(range, revision))
            }
        };
        Ok(ResponseOp { response: Some(outcome) })
    }

    fn put(&mut self, request: &PutRequest, revision: i64) -> PutResponse {
        let PutRequest { key, value, lease } = request.clone();
        let earlier = self.get(&key);
        let (create_revision, version) =
            earlier.map_or((revision, 1), |entry| (entry.create_revision, entry.version + 1));
        let entry = KeyValue { key, create_revision, mod_revision: revision, version, value, lease };
        self.write(entry.key.clone(), revision, Some(entry));
        PutResponse { header: self.header() }
    }

    fn delete(&mut self, request: &DeleteRangeRequest, revision: i64) -> DeleteRangeResponse {
        let found = self.find(&request.key, &request.range_end, self.revision);
        let keys: Vec<_> = found.into_iter().map(|entry| entry.key.clone()).collect();
        let deleted = i64::try_from(keys.len()).expect("the number of entries fits i64");
        keys.into_iter().for_each(|key| self.write(key, revision, None));
        DeleteRangeResponse { header: self.header(), deleted }
    }

    fn write(&mut self, key: Vec<u8>, revision: i64, entry: Option<KeyValue>) {
        self.entries.entry(key).or_default().push((revision, entry));
        self.revision = revision;
    }

    fn revoke(&mut self, lease: i64) -> Result<LeaseRevokeResponse, Status> {
        self.leases.remove(&lease).ok_or_else(lease_not_found)?;
        let all = self.find(&[], &[0], self.revision);
        let keys: Vec<_> =
            all.into_iter().filter(|entry| entry.lease == lease).map(|entry| entry.key.clone()).collect();
        let revision = self.revision + 1;
        keys.into_iter().for_each(|key| self.write(key, revision, None));
        Ok(LeaseRevokeResponse { header: self.header() })
    }
}

/// Handler of all services.
#[derive(Clone, Debug)]
struct Service(Arc<Mutex<State>>);

#[tonic::async_trait]
impl Kv for Service {
    async fn range(&self, request: Request<RangeRequest>) -> Result<Response<RangeResponse>, Status> {
        lock(&self.0).call(|keys| keys.range(request.get_ref()))
    }

    async fn txn(&self, request: Request<TxnRequest>) -> Result<Response<TxnResponse>, Status> {
        let mut state = lock(&self.0);
        match state.next_fault() {
            Fault::None => state.keys.transact(request.get_ref()).map(Response::new),
            Fault::LostCall => Err(unavailable()),
            Fault::LostAnswer => state.keys.transact(request.get_ref()).and_then(|_| Err(unavailable())),
            Fault::LateCall => {
                state.late.push(request.into_inner());
                Err(unavailable())
            }
        }
    }

    async fn compact(
        &self,
        request: Request<CompactionRequest>,
    ) -> Result<Response<CompactionResponse>, Status> {
        lock(&self.0).call(|keys| {
            keys.compacted = keys.compacted.max(request.get_ref().revision);
            Ok(CompactionResponse { header: keys.header() })
        })
    }
}

#[tonic::async_trait]
impl Lease for Service {
    type LeaseKeepAliveStream = Once<Result<LeaseKeepAliveResponse, Status>>;

    async fn lease_grant(
        &self,
        request: Request<LeaseGrantRequest>,
    ) -> Result<Response<LeaseGrantResponse>, Status> {
        lock(&self.0).call(|keys| {
            keys.leases_granted += 1;
            let (id, ttl) = (keys.leases_granted, request.get_ref().ttl);
            keys.leases.insert(id, ttl);
            Ok(LeaseGrantResponse { header: keys.header(), id, ttl, error: String::new() })
        })
    }

    async fn lease_revoke(
        &self,
        request: Request<LeaseRevokeRequest>,
    ) -> Result<Response<LeaseRevokeResponse>, Status> {
        lock(&self.0).call(|keys| keys.revoke(request.get_ref().id))
    }

    async fn lease_keep_alive(
        &self,
        request: Request<Streaming<LeaseKeepAliveRequest>>,
    ) -> Result<Response<Self::LeaseKeepAliveStream>, Status> {
        let first = request.into_inner().next().await;
        let id = first.ok_or_else(|| Status::invalid_argument("no request"))??.id;
        lock(&self.0).call(|keys| {
            let ttl = keys.leases.get(&id).copied().unwrap_or(0);
            Ok(tokio_stream::once(Ok(LeaseKeepAliveResponse { header: keys.header(), id, ttl })))
        })
    }
}

#[tonic::async_trait]
impl Maintenance for Service {
    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<StatusResponse>, Status> {
        lock(&self.0).call(|keys| Ok(StatusResponse { header: keys.header(), ..StatusResponse::default() }))
    }
}
