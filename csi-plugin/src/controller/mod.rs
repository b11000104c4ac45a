//! The controller service: which name has which id, source and parameters. It looks at no source, and connects to a store
//! only to delete a volume's directory.

pub mod capacity;
pub mod claim;
mod context;
mod deletion;
pub mod erasures;
pub mod records;
mod secrets;
pub mod unclaimed;

use crate::busy::{Busy, PATIENCE};
use crate::calls;
use crate::request::{access, not_offered};
use crate::status::Failure;
use capacity::Range;
use claim::Claims;
use context::Unfilled;
use erasures::Erasures;
use proto::csi::v1::controller_server::Controller;
use proto::csi::v1::controller_service_capability::{Rpc, Type, rpc};
use proto::csi::v1::*;
use records::{Record, RecordError, Records};
use std::sync::Arc;
use store::LimitsConfig;
use tonic::{Request, Response, Status};
use volume::{AllowList, Credentials, VolumeId};

/// CSI allows 128 bytes; some callers send exactly that.
const NAME_BYTES_MAX: usize = 128;
/// Most entries in one ListVolumes answer, whatever was asked.
const PAGE_MAX: usize = 1000;
/// First characters of our tokens, so that a stranger's is recognised.
const TOKEN: &str = "after:";

impl From<RecordError> for Failure {
    fn from(error: RecordError) -> Self {
        match error {
            RecordError::Cluster(error) => error.into(),
            error @ (RecordError::Io { .. }
            | RecordError::Malformed { .. }
            | RecordError::Format { .. }
            | RecordError::Pruned { .. }) => Self::Internal(error.to_string()),
        }
    }
}

#[derive(Clone, Debug)]
pub struct ControllerService {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    records: Arc<dyn Records>,
    /// None: no API server, so no class may look at its claims.
    claims: Option<Claims>,
    allow: Option<AllowList>,
    busy: Arc<Busy>,
    erasures: Erasures,
}

impl ControllerService {
    /// `stores` and `pace`: for volumes whose directories are deleted with them.
    pub fn new(
        records: Box<dyn Records>,
        claims: Option<Claims>,
        allow: Option<AllowList>,
        stores: LimitsConfig,
        pace: erasures::Pace,
    ) -> Self {
        let records: Arc<dyn Records> = records.into();
        let erasures = Erasures::new(records.clone(), stores, pace);
        Self { inner: Arc::new(Inner { records, claims, allow, busy: Arc::default(), erasures }) }
    }
}

impl Inner {
    fn create(&self, request: &CreateVolumeRequest) -> Result<Record, Failure> {
        if request.name.is_empty() {
            return Err(Failure::missing("name"));
        }
        if request.name.len() > NAME_BYTES_MAX {
            return Err(Failure::Invalid(format!("name is longer than {NAME_BYTES_MAX} bytes")));
        }
        capabilities(&request.volume_capabilities)?;
        if request.volume_content_source.is_some() {
            return Err(Failure::Invalid("clones and snapshots are not offered".into()));
        }
        if let Some(key) = request.mutable_parameters.keys().next() {
            return Err(Failure::Invalid(format!(
                "mutable parameter {key:?}: no parameter can be changed later"
            )));
        }
        Credentials::from_secrets(&request.secrets)?;
        let range = Range::parse(request.capacity_range.as_ref())?;
        let context = self.context(request);

        let id = records::id_of(&request.name);
        let _turn = self.busy.enter(&[format!("volume {id}")], PATIENCE)?;
        let digest = context::digest(request);
        let made = match context {
            Ok((context, deletion)) => {
                let mut record = Record::new(&request.name, range.chosen(), context, digest.clone());
                record.deletion = deletion;
                self.check_new(&record, &request.secrets)?;
                if self.records.insert(&record)? {
                    // Another one may have come, or gone, since it was looked.
                    if let Err(failure) = self.check_place(&record) {
                        self.records.remove(&id)?;
                        return Err(failure);
                    }
                    tracing::info!(volume = %id, source = ?record.context.get("source"), "volume created");
                    return Ok(record);
                }
                Ok(record)
            }
            Err(Unfilled::Refused(failure)) => return Err(failure),
            Err(Unfilled::Claim(failure)) => Err(failure),
        };
        // Of an answer that was lost: the same question has the same answer, whatever became of the claim meanwhile.
        let existing = match (self.records.get(&id), made) {
            (Ok(Some(existing)), _) if existing.is_going() => {
                return Err(Failure::Busy(format!("volume {}, which is being deleted,", existing.id)));
            }
            (Ok(Some(existing)), Ok(record))
                if existing.context == record.context && existing.deletion == record.deletion =>
            {
                existing
            }
            (Ok(Some(existing)), _) if context::asks_again(&existing, request, &digest) => existing,
            (Ok(Some(_)), Ok(_)) => return Err(exists(&id, "parameters")),
            (Ok(None), Ok(_)) => return Err(Failure::Busy(id.to_string())),
            (Err(error), Ok(_)) => return Err(error.into()),
            (_, Err(failure)) => return Err(failure),
        };
        if existing.name != request.name {
            return Err(exists(&id, "name"));
        }
        if !range.accepts(existing.capacity_bytes) {
            return Err(exists(&id, "capacity"));
        }
        self.check_again(&existing)?;
        match self.records.hand_out_again(&existing)? {
            true => Ok(existing),
            false => Err(Failure::Busy(id.to_string())),
        }
    }

    fn validate(
        &self,
        request: ValidateVolumeCapabilitiesRequest,
    ) -> Result<ValidateVolumeCapabilitiesResponse, Failure> {
        if request.volume_id.is_empty() {
            return Err(Failure::missing("volume_id"));
        }
        if request.volume_capabilities.is_empty() {
            return Err(Failure::missing("volume_capabilities"));
        }
        let record = self.find(&request.volume_id)?;
        let objection =
            capabilities(&request.volume_capabilities).err().map(|e| e.to_string()).or_else(|| {
                let known = request.volume_context.iter().all(|(k, v)| record.context.get(k) == Some(v));
                (!known).then(|| "the volume has another volume_context".to_owned())
            });
        Ok(match objection {
            Some(message) => ValidateVolumeCapabilitiesResponse { confirmed: None, message },
            None => ValidateVolumeCapabilitiesResponse {
                confirmed: Some(validate_volume_capabilities_response::Confirmed {
                    volume_context: request.volume_context,
                    volume_capabilities: request.volume_capabilities,
                    parameters: request.parameters,
                    mutable_parameters: Default::default(),
                }),
                message: String::new(),
            },
        })
    }

    fn find(&self, id: &str) -> Result<Record, Failure> {
        let unknown = || Failure::NotFound(format!("volume {id} does not exist"));
        let parsed = VolumeId::parse(id).map_err(|_| unknown())?;
        self.records.get(&parsed)?.ok_or_else(unknown)
    }

    fn list(&self, request: &ListVolumesRequest) -> Result<ListVolumesResponse, Failure> {
        let max = usize::try_from(request.max_entries)
            .map_err(|_| Failure::Invalid("max_entries must not be negative".into()))?;
        let after = match request.starting_token.as_str() {
            "" => None,
            token => Some(
                token
                    .strip_prefix(TOKEN)
                    .and_then(|id| VolumeId::parse(id).ok())
                    .ok_or_else(|| Failure::BadToken(token.to_owned()))?,
            ),
        };
        let max = if max == 0 { PAGE_MAX } else { max.min(PAGE_MAX) };
        let (records, more) = self.records.list(after.as_ref(), max)?;
        let last = records.last().map(|r| format!("{TOKEN}{}", r.id));
        Ok(ListVolumesResponse {
            next_token: last.filter(|_| more).unwrap_or_default(),
            entries: records
                .into_iter()
                .map(|r| list_volumes_response::Entry { volume: Some(volume(r)), status: None })
                .collect(),
        })
    }
}

fn exists(id: &VolumeId, differs: &str) -> Failure {
    Failure::Conflict(format!("volume {id} exists already with another {differs}"))
}

fn capabilities(list: &[VolumeCapability]) -> Result<(), Failure> {
    if list.is_empty() {
        return Err(Failure::missing("volume_capabilities"));
    }
    list.iter().try_for_each(|c| access(Some(c)).map(drop))
}

fn volume(record: Record) -> Volume {
    Volume {
        capacity_bytes: record.capacity_bytes,
        volume_id: record.id.to_string(),
        volume_context: record.context.into_iter().collect(),
        content_source: None,
        accessible_topology: Vec::new(),
    }
}

#[tonic::async_trait]
impl Controller for ControllerService {
    async fn create_volume(
        &self,
        request: Request<CreateVolumeRequest>,
    ) -> Result<Response<CreateVolumeResponse>, Status> {
        let request = request.into_inner();
        calls::blocking(&self.inner, "CreateVolume", move |inner| {
            inner.create(&request).map(|record| CreateVolumeResponse { volume: Some(volume(record)) })
        })
        .await
    }

    async fn delete_volume(
        &self,
        request: Request<DeleteVolumeRequest>,
    ) -> Result<Response<DeleteVolumeResponse>, Status> {
        let request = request.into_inner();
        calls::blocking(&self.inner, "DeleteVolume", move |inner| {
            inner.delete(&request).map(|()| DeleteVolumeResponse {})
        })
        .await
    }

    async fn validate_volume_capabilities(
        &self,
        request: Request<ValidateVolumeCapabilitiesRequest>,
    ) -> Result<Response<ValidateVolumeCapabilitiesResponse>, Status> {
        let request = request.into_inner();
        calls::blocking(&self.inner, "ValidateVolumeCapabilities", move |inner| inner.validate(request)).await
    }

    async fn list_volumes(
        &self,
        request: Request<ListVolumesRequest>,
    ) -> Result<Response<ListVolumesResponse>, Status> {
        let request = request.into_inner();
        calls::blocking(&self.inner, "ListVolumes", move |inner| inner.list(&request)).await
    }

    async fn controller_get_capabilities(
        &self,
        _: Request<ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<ControllerGetCapabilitiesResponse>, Status> {
        let offered =
            [rpc::Type::CreateDeleteVolume, rpc::Type::ListVolumes, rpc::Type::SingleNodeMultiWriter];
        let capability = |kind: rpc::Type| ControllerServiceCapability {
            r#type: Some(Type::Rpc(Rpc { r#type: kind.into() })),
        };
        Ok(Response::new(ControllerGetCapabilitiesResponse {
            capabilities: offered.into_iter().map(capability).collect(),
        }))
    }

    not_offered! {
        controller_publish_volume: ControllerPublishVolumeRequest -> ControllerPublishVolumeResponse,
        controller_unpublish_volume: ControllerUnpublishVolumeRequest -> ControllerUnpublishVolumeResponse,
        get_capacity: GetCapacityRequest -> GetCapacityResponse,
        create_snapshot: CreateSnapshotRequest -> CreateSnapshotResponse,
        delete_snapshot: DeleteSnapshotRequest -> DeleteSnapshotResponse,
        list_snapshots: ListSnapshotsRequest -> ListSnapshotsResponse,
        get_snapshot: GetSnapshotRequest -> GetSnapshotResponse,
        controller_expand_volume: ControllerExpandVolumeRequest -> ControllerExpandVolumeResponse,
        controller_get_volume: ControllerGetVolumeRequest -> ControllerGetVolumeResponse,
        controller_modify_volume: ControllerModifyVolumeRequest -> ControllerModifyVolumeResponse,
    }
}
