//! Tests of gRPC server reflection with a real manager and a client without generated code.
#![allow(clippy::unwrap_used, reason = "test code: a failed unwrap fails the test")]

use std::collections::BTreeSet;

use prost::Message as _;
use prost_reflect::{DescriptorPool, DynamicMessage, MethodDescriptor, ReflectMessage as _, Value};
use tests::rack::{Plan, Rack};
use tonic::{
    Code, Status,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    transport::Channel,
};
use tonic_reflection::pb::v1::{
    ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
    server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
};

/// Services of the manager, except the reflection service.
const SERVICES: [&str; 5] =
    ["grpc.health.v1.Health", "tarn.v1.Admin", "tarn.v1.Agent", "tarn.v1.Models", "tarn.v1.Scheduler"];

/// Sends one request to the reflection service and returns the response.
async fn send_reflection_request(
    channel: Channel,
    request: MessageRequest,
) -> Result<MessageResponse, Status> {
    let request = ServerReflectionRequest { host: String::new(), message_request: Some(request) };
    let mut client = ServerReflectionClient::new(channel);
    let responses = client.server_reflection_info(tokio_stream::once(request)).await?;
    let response = responses.into_inner().message().await?.expect("one response per request");
    Ok(response.message_response.expect("a response has content"))
}

async fn list_services(channel: Channel) -> BTreeSet<String> {
    let response =
        send_reflection_request(channel, MessageRequest::ListServices(String::new())).await.unwrap();
    let MessageResponse::ListServicesResponse(list) = response else { panic!("{response:?}") };
    list.service.into_iter().map(|service| service.name).collect()
}

/// Part of a `FileDescriptorProto`: the names of a proto file and of its imports.
#[derive(Clone, PartialEq, prost::Message)]
struct FileNames {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, repeated, tag = "3")]
    imports: Vec<String>,
}

/// Downloads the proto file that defines a symbol, with all its imports.
async fn descriptor_pool(channel: Channel, symbol: &str) -> DescriptorPool {
    let mut files = Vec::new();
    let mut fetched = BTreeSet::new();
    let mut requests = vec![MessageRequest::FileContainingSymbol(symbol.to_owned())];
    while let Some(request) = requests.pop() {
        let response = send_reflection_request(channel.clone(), request).await.unwrap();
        let MessageResponse::FileDescriptorResponse(response) = response else { panic!("{response:?}") };
        for file in response.file_descriptor_proto {
            let names = FileNames::decode(file.as_slice()).unwrap();
            if fetched.insert(names.name.clone()) {
                files.push((names.name, file));
                requests.extend(names.imports.into_iter().map(MessageRequest::FileByFilename));
            }
        }
    }
    files.reverse(); // imported files come first
    let mut pool = DescriptorPool::new();
    while !files.is_empty() {
        let before = files.len();
        files.retain(|(_, file)| pool.decode_file_descriptor_proto(file.as_slice()).is_err());
        assert!(files.len() < before, "unresolved import in {:?}", files.first());
    }
    pool
}

/// Codec for the messages of a method, based on their descriptors.
struct DynamicCodec(MethodDescriptor);

impl Codec for DynamicCodec {
    type Encode = DynamicMessage;
    type Decode = DynamicMessage;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self(self.0.clone())
    }

    fn decoder(&mut self) -> Self {
        Self(self.0.clone())
    }
}

impl Encoder for DynamicCodec {
    type Item = DynamicMessage;
    type Error = Status;

    fn encode(&mut self, message: DynamicMessage, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        message.encode(buffer).map_err(|error| Status::internal(error.to_string()))
    }
}

impl Decoder for DynamicCodec {
    type Item = DynamicMessage;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<DynamicMessage>, Status> {
        let message = DynamicMessage::decode(self.0.output(), buffer);
        message.map(Some).map_err(|error| Status::internal(error.to_string()))
    }
}

/// Calls a unary method with an empty request.
async fn call_method(channel: Channel, method: MethodDescriptor) -> Result<DynamicMessage, Status> {
    let path = format!("/{}/{}", method.parent_service().full_name(), method.name());
    let request = DynamicMessage::new(method.input());
    let mut client = tonic::client::Grpc::new(channel);
    client.ready().await.unwrap();
    let path = path.try_into().unwrap();
    let response = client.unary(tonic::Request::new(request), path, DynamicCodec(method)).await?;
    Ok(response.into_inner())
}

fn find_method(pool: &DescriptorPool, service: &str, name: &str) -> MethodDescriptor {
    let service = pool.get_service_by_name(service).unwrap();
    service.methods().find(|method| method.name() == name).unwrap()
}

#[tokio::test]
async fn reflection_lists_services_of_manager() {
    let mut rack = Rack::new(Plan::small(2));
    rack.start_manager().await;
    let channel = rack.open_channel().await;
    let listed = list_services(channel.clone()).await;
    assert_eq!(listed, SERVICES.map(str::to_owned).into());
    let mut methods = BTreeSet::new();
    for service in listed.iter().filter(|service| service.starts_with("tarn.")) {
        let pool = descriptor_pool(channel.clone(), service).await;
        let service = pool.get_service_by_name(service).unwrap();
        methods.extend(service.methods().map(|method| method.full_name().to_owned()));
    }
    let served = proto::v1::RPC_METHODS.iter().filter(|(service, ..)| listed.contains(*service));
    assert_eq!(methods, served.map(|(service, method, _)| format!("{service}.{method}")).collect());
    let pool = descriptor_pool(channel.clone(), "grpc.health.v1.Health").await;
    call_method(channel.clone(), find_method(&pool, "grpc.health.v1.Health", "Check")).await.unwrap();
}

#[tokio::test]
async fn reflection_has_error_details_but_no_other_services() {
    let mut rack = Rack::new(Plan::small(2));
    rack.start_manager().await;
    let channel = rack.open_channel().await;
    for name in ["google.rpc.ErrorInfo", "google.rpc.BadRequest", "google.rpc.RetryInfo"] {
        let pool = descriptor_pool(channel.clone(), name).await;
        assert!(pool.get_message_by_name(name).is_some(), "{name}");
    }
    for name in [
        "tarn.v1.Vmm",
        "tarn.v1.Nothing",
        "google.rpc.Nothing",
        "etcdserverpb.KV",
        "grpc.reflection.v1alpha.ServerReflection",
    ] {
        let request = MessageRequest::FileContainingSymbol(name.to_owned());
        let status = send_reflection_request(channel.clone(), request).await.expect_err(name);
        assert_eq!(status.code(), Code::NotFound, "{name}");
    }
}

#[tokio::test]
async fn reflection_is_also_served_as_version_1alpha() {
    use tonic_reflection::pb::v1alpha;
    let mut rack = Rack::new(Plan::small(2));
    rack.start_manager().await;
    let list = v1alpha::server_reflection_request::MessageRequest::ListServices(String::new());
    let request = v1alpha::ServerReflectionRequest { host: String::new(), message_request: Some(list) };
    let channel = rack.open_channel().await;
    let mut client = v1alpha::server_reflection_client::ServerReflectionClient::new(channel.clone());
    let responses = client.server_reflection_info(tokio_stream::once(request)).await.unwrap();
    let response = responses.into_inner().message().await.unwrap().unwrap().message_response;
    let Some(v1alpha::server_reflection_response::MessageResponse::ListServicesResponse(list)) = response
    else {
        panic!("{response:?}")
    };
    let names: BTreeSet<String> = list.service.into_iter().map(|service| service.name).collect();
    assert!(SERVICES.iter().all(|name| names.contains(*name)), "{names:?}");
}

#[tokio::test]
async fn client_lists_hosts_by_reflection_only() {
    let rack = Rack::start(Plan::small(2)).await;
    let channel = rack.open_channel().await;
    let pool = descriptor_pool(channel.clone(), "tarn.v1.Admin").await;
    let response = call_method(channel, find_method(&pool, "tarn.v1.Admin", "ListHosts")).await.unwrap();
    let hosts = response.get_field_by_name("hosts").unwrap().into_owned();
    let Value::List(hosts) = hosts else { panic!("{hosts:?}") };
    let name = |host: &Value| {
        let host = host.as_message().unwrap();
        assert_eq!(host.descriptor().full_name(), "tarn.v1.Host");
        host.get_field_by_name("host").unwrap().as_str().unwrap().to_owned()
    };
    assert_eq!(hosts.iter().map(name).collect::<Vec<_>>(), ["h0", "h1"]);
}
