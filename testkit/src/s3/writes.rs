//! Objects that are put whole, copied and deleted.

use super::Rights;
use super::answers::{etag, failed};
use super::bucket::Bucket;
use super::conditions::Condition;
use super::digests::{Checksum, Digests};
use super::draft::{About, Draft};
use super::meta::Meta;
use super::pieces::Pieces;
use super::state::Service;
use bytes::Bytes;
use futures::StreamExt;
use http::HeaderMap;
use s3s::dto::*;
use s3s::{S3Request, S3Response, S3Result, s3_error};
use std::ops::Range;
use std::sync::Arc;

/// The body of a request as it arrived, for operations that see only what `s3s` read from it.
#[derive(Clone)]
pub(super) struct Raw(pub(super) Bytes);

/// Most bytes of all names and values of an object's metadata.
const METADATA_MAX: usize = 2048;
const BATCH_MAX: usize = 1000;

/// What a request wants to be kept with an object.
pub(super) fn about(content_type: Option<ContentType>, metadata: Option<Metadata>) -> S3Result<About> {
    let metadata = metadata.unwrap_or_default();
    if metadata.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>() > METADATA_MAX {
        return Err(s3_error!(MetadataTooLarge, "the metadata exceed the maximum allowed metadata size"));
    }
    Ok(About { content_type, metadata: metadata.into_iter().collect(), checksum: None })
}

/// A body with the checksum that it was claimed, and found, to have.
pub(super) async fn receive(
    body: Option<StreamingBlob>,
    headers: &HeaderMap,
    trailers: Option<s3s::TrailingHeaders>,
    no_checksums: bool,
) -> S3Result<(Bytes, Option<Checksum>)> {
    let mut received = Bytes::new();
    if let Some(mut body) = body {
        while let Some(piece) = body.next().await {
            let piece = piece.map_err(|e| s3_error!(IncompleteBody, "body: {e}"))?;
            // It mostly comes in one piece: see `incoming`.
            received = if received.is_empty() { piece } else { [received, piece].concat().into() };
        }
    }
    // They are known only now.
    let trailers = trailers.and_then(|trailers| trailers.take());
    let digests = Digests::of(headers, trailers.as_ref(), no_checksums)?;
    digests.check(&received)?;
    Ok((received, digests.checksum))
}

/// The headers that tell a checksum.
pub(super) fn told(checksum: Option<&Checksum>) -> HeaderMap {
    let value = |text: &str| http::HeaderValue::try_from(text).expect("Base64 can be sent");
    let mut headers = HeaderMap::new();
    if let Some(checksum) = checksum {
        headers.insert(checksum.algorithm.header(), value(&checksum.value));
        headers.insert("x-amz-checksum-type", value(ChecksumType::FULL_OBJECT));
    }
    headers
}

pub(super) async fn put_object(
    service: &Service,
    req: S3Request<PutObjectInput>,
) -> S3Result<S3Response<PutObjectOutput>> {
    let (input, lies) = (req.input, &service.lies);
    let bucket = service.bucket(&input.bucket)?;
    let condition = condition(service, input.if_match.as_ref(), input.if_none_match.as_ref())?;
    let about = about(input.content_type, input.metadata)?;
    let (body, checksum) = receive(input.body, &req.headers, req.trailing_headers, lies.no_checksums).await?;
    let headers = told(checksum.as_ref());
    let draft = Draft {
        body: body.into(),
        about: About { checksum, ..about },
        parts: None,
        modified: service.guard.now(),
    };
    let meta = service.store(&bucket, &input.key, draft, &condition)?;
    let output = PutObjectOutput { e_tag: etag(&meta), ..PutObjectOutput::default() };
    Ok(S3Response::with_headers(output, headers))
}

fn condition(
    service: &Service,
    if_match: Option<&ETagCondition>,
    if_none_match: Option<&ETagCondition>,
) -> S3Result<Condition> {
    let if_match = if_match.filter(|_| !service.lies.ignores_if_match_on_put);
    let if_none_match = if_none_match.filter(|_| !service.lies.ignores_if_none_match);
    Condition::of(if_match, if_none_match)
}

/// What a copy is made of.
pub(super) struct Source {
    pub(super) bucket: Arc<dyn Bucket>,
    pub(super) name: (String, String),
    pub(super) meta: Meta,
}

impl Source {
    pub(super) fn find(
        service: &Service,
        source: &CopySource,
        if_match: Option<&ETagCondition>,
        if_none_match: Option<&ETagCondition>,
    ) -> S3Result<Self> {
        let CopySource::Bucket { bucket, key, version_id: None } = source else {
            return Err(s3_error!(NotImplemented, "the testkit copies objects of buckets, without versions"));
        };
        let name = (bucket.to_string(), key.to_string());
        let (bucket, meta) = service.object(bucket, key)?;
        let is = |condition: &ETagCondition| match condition {
            ETagCondition::Any => true,
            ETagCondition::ETag(etag) => etag.value() == meta.etag,
        };
        if if_match.is_some_and(|wanted| !is(wanted)) || if_none_match.is_some_and(is) {
            return Err(s3_error!(PreconditionFailed, "a precondition of the source did not hold"));
        }
        Ok(Self { bucket, name, meta })
    }

    /// Refuses, as AWS does, what only a copy in parts can copy.
    pub(super) async fn read(&self, range: Range<u64>, copy_max: u64) -> S3Result<Pieces> {
        if range.end - range.start > copy_max {
            let why = "the specified copy source is larger than the maximum allowable size for a copy source";
            return Err(s3_error!(InvalidRequest, "{why}: {copy_max}"));
        }
        let mut body = self.bucket.read(&self.name.1, &self.meta, range).map_err(failed)?;
        let mut pieces = Vec::new();
        while let Some(piece) = body.next().await {
            pieces.push(piece.map_err(failed)?);
        }
        Ok(pieces.into_iter().collect())
    }
}

pub(super) async fn copy_object(
    service: &Service,
    req: S3Request<CopyObjectInput>,
) -> S3Result<S3Response<CopyObjectOutput>> {
    let input = req.input;
    let bucket = service.bucket(&input.bucket)?;
    // `s3s` does not know that a copy may have these.
    let header =
        |name: &str| req.headers.get(name).map(|value| ETagCondition::parse_http_header(value.as_bytes()));
    let invalid = |e| s3_error!(e, InvalidArgument, "not an ETag");
    let if_match = header("if-match").transpose().map_err(invalid)?;
    let if_none_match = header("if-none-match").transpose().map_err(invalid)?;
    let condition = condition(service, if_match.as_ref(), if_none_match.as_ref())?;
    let source = Source::find(
        service,
        &input.copy_source,
        input.copy_source_if_match.as_ref(),
        input.copy_source_if_none_match.as_ref(),
    )?;
    let replaces = input
        .metadata_directive
        .as_ref()
        .is_some_and(|directive| directive.as_str() == MetadataDirective::REPLACE);
    if !replaces && source.name == (input.bucket, input.key.clone()) {
        let why = "this copy request is illegal because it copies an object to itself without changing it";
        return Err(s3_error!(InvalidRequest, "{why}"));
    }
    let of_source = source.meta.about.as_deref().cloned().unwrap_or_default();
    let about = match replaces {
        true => About { checksum: of_source.checksum, ..about(input.content_type, input.metadata)? },
        false => of_source,
    };
    let body = source.read(0..source.meta.size, service.limits.copy_max).await?;
    let [checksum_crc32, checksum_crc32c, checksum_crc64nvme] = Checksum::fields(about.checksum.as_ref());
    let draft = Draft { body, about, parts: None, modified: service.guard.now() };
    let meta = service.store(&bucket, &input.key, draft, &condition)?;
    let result = CopyObjectResult {
        e_tag: etag(&meta),
        last_modified: Some(meta.modified.into()),
        checksum_crc32,
        checksum_crc32c,
        checksum_crc64nvme,
        ..CopyObjectResult::default()
    };
    let output = CopyObjectOutput { copy_object_result: Some(result), ..CopyObjectOutput::default() };
    Ok(S3Response::new(output))
}

pub(super) fn delete_object(service: &Service, input: &DeleteObjectInput) -> S3Result<()> {
    let bucket = service.bucket(&input.bucket)?;
    let condition = Condition::of(input.if_match.as_ref(), None)?;
    let condition = condition.unless(service.lies.ignores_if_match_on_delete);
    Ok(bucket.delete_if(&input.key, &condition).map_err(failed)??)
}

pub(super) fn delete_objects(
    service: &Service,
    req: S3Request<DeleteObjectsInput>,
) -> S3Result<S3Response<DeleteObjectsOutput>> {
    let input = req.input;
    let bucket = service.bucket(&input.bucket)?;
    if input.delete.objects.is_empty() || input.delete.objects.len() > BATCH_MAX {
        return Err(s3_error!(MalformedXML, "a batch has 1 to {BATCH_MAX} keys"));
    }
    let digests = Digests::of(&req.headers, None, service.lies.no_checksums)?;
    if digests.is_empty() && !service.lies.no_checksums {
        return Err(s3_error!(InvalidRequest, "missing required header: Content-MD5 or x-amz-checksum-*"));
    }
    // `s3s` has unwrapped the body of a client that signs in pieces.
    let is_wrapped = |value: &http::HeaderValue| value.as_bytes().starts_with(b"STREAMING-");
    let is_wrapped = req.headers.get("x-amz-content-sha256").is_some_and(is_wrapped);
    if let Some(Raw(body)) = req.extensions.get().filter(|_| !is_wrapped) {
        digests.check(body)?;
    }
    let rights = req.extensions.get::<Rights>().copied().unwrap_or(Rights::All);
    let (mut deleted, mut errors) = (Vec::new(), Vec::new());
    for object in input.delete.objects {
        let expected = object.e_tag.map(ETagCondition::ETag);
        let condition = Condition::of(expected.as_ref(), None)?;
        let condition = condition.unless(service.lies.ignores_if_match_on_delete);
        let done = match rights.allow("DeleteObject") {
            true => bucket.delete_if(&object.key, &condition).map_err(failed)?.map_err(s3s::S3Error::from),
            false => Err(s3_error!(AccessDenied, "this key may not do that")),
        };
        let key = Some(object.key);
        match done {
            Ok(()) => deleted.push(DeletedObject { key, ..DeletedObject::default() }),
            Err(e) => errors.push(Error {
                code: Some(e.code().as_str().to_owned()),
                message: e.message().map(str::to_owned),
                key,
                version_id: None,
            }),
        }
    }
    let is_quiet = input.delete.quiet.unwrap_or(false);
    let output = DeleteObjectsOutput {
        deleted: (!is_quiet).then_some(deleted),
        errors: Some(errors),
        ..DeleteObjectsOutput::default()
    };
    Ok(S3Response::new(output))
}
